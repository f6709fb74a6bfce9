"""When a run saves, what it says of it, and what it resumes from."""
