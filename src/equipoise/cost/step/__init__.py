"""A training step as it is priced: the request, and the work and seconds of a layer."""
