"""Benches of forecasts beside published measurements."""
