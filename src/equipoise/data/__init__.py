"""Floor 6: documents, from where they lie to the pieces of a step. Imports no torch itself."""
