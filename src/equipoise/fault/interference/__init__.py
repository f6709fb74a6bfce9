"""Noisy neighbours: what a rank's host does each second, and whether that slows the rank."""
