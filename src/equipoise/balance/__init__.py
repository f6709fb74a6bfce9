"""Floor 5: who computes what. Every balancer of the product shares one set of algorithms."""
