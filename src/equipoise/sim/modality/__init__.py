"""Encoders of images and sound beside a decoder: what they add to a step."""
