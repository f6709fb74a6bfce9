"""Scores of a trained recommender: columns in, the logits of its own evaluation out."""
