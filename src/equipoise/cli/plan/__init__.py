"""``equipoise plan``: the verb, the lock it writes, its tables."""
