"""The search: bounds first, prices for what no bound rules out, best first."""
