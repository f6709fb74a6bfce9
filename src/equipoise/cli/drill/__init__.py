"""``equipoise drill``: the verb, and what it can rehearse."""
