"""The serving engine: iterations of many requests over one paged cache of keys and values."""
