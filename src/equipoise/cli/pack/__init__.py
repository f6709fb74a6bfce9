"""``equipoise pack``: the verb and its table."""
