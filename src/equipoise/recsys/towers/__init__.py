"""Towers: tables of one host, looked up and condensed there before anything leaves it."""
