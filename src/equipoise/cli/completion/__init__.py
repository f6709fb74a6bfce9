"""``equipoise completion``: the words of the command line, and scripts of three shells."""
