"""Floor 3: facts. Events, the journal they are written to, and what is read off them."""
