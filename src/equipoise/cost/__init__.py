"""Floor 4: what work costs, in counts, bytes and seconds. No torch."""
