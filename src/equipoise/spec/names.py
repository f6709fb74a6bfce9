"""Names of files that several rooms look for."""

RESOLVED = "resolved.json"
"""The resolved run, in a run's folder."""
