"""Which rows lie in the fast tier, step after step."""
