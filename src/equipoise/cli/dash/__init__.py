"""``equipoise dash``: the verb."""
