"""Functions that tests run on ranks: other processes, which import them by name."""
