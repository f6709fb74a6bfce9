"""Encoders beside a decoder: items on the ranks of a plan, a bridge to the decoder and back."""
