"""Attention over several ranks as data: strategies, their proof, their price."""
