"""Packing policies compared on equal content: seconds, memory, delay, and bounds."""
