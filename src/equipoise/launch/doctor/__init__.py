"""What of this machine would break a run: facts read, and judged."""
