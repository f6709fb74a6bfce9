"""Floor 2: the nouns. Frozen dataclasses for what is wished and what was decided."""
