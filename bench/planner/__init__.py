"""Benches of searches and of the plans that they return."""
