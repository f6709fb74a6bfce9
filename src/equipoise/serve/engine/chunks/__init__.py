"""Attention of long chunks on processors that multiply pairs of bf16."""
