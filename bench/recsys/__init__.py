"""Benches of recommenders on MovieLens 100K."""
