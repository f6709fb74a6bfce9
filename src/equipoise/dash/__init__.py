"""What people look at: the report of finished runs. It reads run folders and nothing else."""
