"""Facts. Events, the journal that holds them, and what is read from it."""
