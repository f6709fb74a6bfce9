"""How rightly, and how soon, faults of ranks are named."""
