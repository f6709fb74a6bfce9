"""Benches of rows that travel while others are computed, on links of limited rate."""
