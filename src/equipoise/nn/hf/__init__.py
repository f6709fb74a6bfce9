"""Weights of Hugging Face folders and GGUF files, read and written by our names."""
