"""Floor 6: checkpoints, each of them whole or absent."""
