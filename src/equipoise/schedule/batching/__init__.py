"""Serving: from requests to iterations, decided without torch."""
