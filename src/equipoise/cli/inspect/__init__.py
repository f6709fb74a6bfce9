"""``equipoise inspect``: the verb and its table."""
