"""Which layout: a search over everything that can be chosen, and why the answer is the answer."""
