"""``equipoise check``: the verb and its tables."""
