"""Recommendation: embedding tables over ranks, their exact optimizers, and models that use them."""
