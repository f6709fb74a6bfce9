"""What work costs, in counts, bytes and seconds. No torch."""
