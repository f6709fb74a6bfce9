"""Functions of ranks in tests of experts."""
