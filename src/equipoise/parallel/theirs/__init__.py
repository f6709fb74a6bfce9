"""Models that transformers builds, trained as our own decoder is."""
