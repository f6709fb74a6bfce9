"""Context sharding: which tokens of a micro-batch each context-parallel rank computes."""
