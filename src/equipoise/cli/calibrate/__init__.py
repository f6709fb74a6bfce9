"""``equipoise calibrate``: the verb and its tables."""
