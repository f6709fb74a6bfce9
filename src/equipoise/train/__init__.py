"""Floor 8: the training loop. It obeys the pack, measures, and writes down both."""
