"""What people look at: reports, pictures and traces of runs, and the live dashboard."""
