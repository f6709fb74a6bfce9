"""Benches of experts: where tokens lie."""
