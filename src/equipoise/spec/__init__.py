"""Floor 2: the nouns. Frozen dataclasses that say what is wished for and what was decided."""
