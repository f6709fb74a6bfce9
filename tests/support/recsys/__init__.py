"""Embedding tables as tests train them: plans, batches, and what ranks run."""
