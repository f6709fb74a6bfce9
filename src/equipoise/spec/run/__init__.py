"""run.toml: every key, how it is read, what it resolves to."""
