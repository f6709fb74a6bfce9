"""Dynamic groups: how many ranks hold each document together, and when."""
