"""``equipoise calibrate``: time this machine's kernels, links and step parts."""
