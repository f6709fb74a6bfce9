"""Measurements. Each prints JSON; both sides of a comparison run interleaved in one run."""
