"""Forecasts of peak memory, term by term."""
