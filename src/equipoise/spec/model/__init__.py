"""Models: sizes, presets, and Hugging Face configurations."""
