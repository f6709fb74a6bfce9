"""Products with bf16 weights that are laid out in panels, compiled for the processor at hand."""
