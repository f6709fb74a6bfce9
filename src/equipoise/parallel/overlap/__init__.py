"""Rows that travel in parts, while the parts before them are computed."""
