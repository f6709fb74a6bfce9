"""Text to tokens: tokenizers, the files beside them, and long texts in parts."""
