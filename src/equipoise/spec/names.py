"""Names of files that several rooms look for, apart from the code that reads them."""

RESOLVED = "resolved.json"
"""The settled run, in a run's folder."""
