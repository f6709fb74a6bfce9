"""What stands in for CUDA devices: a machine that has some, a queue, and ranks of a CPU."""
