"""Floor 4: ranks and their messages. Every collective of the product is here."""
