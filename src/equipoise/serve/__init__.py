"""Text from a trained model: one process, one sequence, no ranks."""
