"""Text from a trained model: one text at a time, or many together, over pages and over ranks."""
