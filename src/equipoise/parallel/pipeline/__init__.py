"""Pipeline parallelism: stages of a decoder on ranks, and the executor of any schedule."""
