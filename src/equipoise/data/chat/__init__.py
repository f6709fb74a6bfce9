"""Conversations: rows of a corpus, written out by a chat template, with the tokens to learn."""
