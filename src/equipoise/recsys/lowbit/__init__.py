"""A recommender in few bits: what parts cost, least bytes within a budget, drift."""
