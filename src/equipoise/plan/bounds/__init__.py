"""Lower bounds of many choices at a time: in bytes, in seconds."""
