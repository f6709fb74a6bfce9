"""The price of a training step: the request, and the work and seconds of a layer."""
