"""Redistribution of one tensor, on ranks. An island: nothing that trains imports it."""
