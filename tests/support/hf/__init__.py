"""Tiny models of Hugging Face families."""
