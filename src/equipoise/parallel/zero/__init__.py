"""Data parallelism with ZeRO 0 to 3."""
