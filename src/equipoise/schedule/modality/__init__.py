"""Embeddings from the ranks that encode to those that need them: a plan, a checker, its bytes."""
