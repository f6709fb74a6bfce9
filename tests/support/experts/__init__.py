"""Experts on the ranks of tests."""
