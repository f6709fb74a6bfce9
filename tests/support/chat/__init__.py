"""Conversations to train on, and the template that writes them out."""
