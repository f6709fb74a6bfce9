"""Serve long contexts: attention and cache of one engine over several ranks."""
