"""Measured curves: grids of seconds over sizes, and where each comes from."""
