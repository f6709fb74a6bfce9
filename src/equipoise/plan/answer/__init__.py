"""The best choices of a search, priced whole and explained."""
