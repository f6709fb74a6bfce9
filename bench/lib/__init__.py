"""What benches share: the stamp of a machine and its load, and a corpus."""
