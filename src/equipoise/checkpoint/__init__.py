"""Floor 6: checkpoints that are whole or are not there."""
