"""Training programs as data: what each does, a TOML file with its sources."""
