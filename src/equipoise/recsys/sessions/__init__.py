"""Samples of sessions: rows that repeat are stored, sent, looked up and computed once."""
