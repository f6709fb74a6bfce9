"""``equipoise convert``: the verb, and checkpoints for another layout."""
