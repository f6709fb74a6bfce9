"""Clusters: nodes of devices, and the links between them."""
