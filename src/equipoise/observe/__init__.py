"""Floor 3: facts. Events, the journal that holds them, and what is read from it."""
