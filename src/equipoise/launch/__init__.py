"""Start ranks, here as forks of one process, elsewhere under torchrun; no torch in this process."""
