"""Who is slow, whose bytes differ: verdicts from what ranks measured. No torch."""
