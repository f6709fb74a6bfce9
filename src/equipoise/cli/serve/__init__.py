"""``equipoise serve``: the verb."""
