"""Sinks: where a run's figures go besides the journal."""
