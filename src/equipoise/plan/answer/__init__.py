"""What a search found, priced whole and explained."""
