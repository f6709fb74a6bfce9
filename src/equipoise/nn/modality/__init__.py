"""Encoders of images and sound as single-device code, and their rows among a decoder's."""
