"""``equipoise check``: loss and every gradient of any layout beside one rank's."""
