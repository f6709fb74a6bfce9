"""Floor 4: ranks and what they say to each other. Every collective of the product is here."""
