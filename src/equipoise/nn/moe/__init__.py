"""A feed-forward of experts: the router, the sorted rows, their products, the balance."""
