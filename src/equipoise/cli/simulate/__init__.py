"""``equipoise simulate``: the verb, what it is asked, its table."""
