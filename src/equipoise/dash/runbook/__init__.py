"""Guides that were run on a run, as its report draws them."""
