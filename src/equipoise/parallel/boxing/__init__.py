"""Redistribution of tensors between ranks, and where torch's own is refused."""
