"""Everything that can be chosen about a step, and which runs ``train`` begins."""
