"""Flags of serving a trace, shared by verbs."""
