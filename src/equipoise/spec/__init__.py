"""The nouns. Frozen dataclasses for what is wished and what was decided."""
