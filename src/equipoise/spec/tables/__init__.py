"""Embedding tables: their sizes and traffic, from names, files or draws."""
