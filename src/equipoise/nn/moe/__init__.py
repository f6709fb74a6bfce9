"""A feed-forward of experts: router, sorted rows, their products, load balance."""
