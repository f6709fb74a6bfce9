"""A batch for any trainer: lengths in, even micro-batches out."""
