"""``equipoise doctor``: the verb and its tables."""
