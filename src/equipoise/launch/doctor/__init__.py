"""What on this machine would break a run: facts, and verdicts on them."""
