"""The token cache: documents tokenized once, kept in shards, verified as they are read."""
