"""The device that a rank computes on: its clock, its memory, and how tensors get there."""
