"""Documents, from files on disk to the pieces of a step. Imports no torch itself."""
