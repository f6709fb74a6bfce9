"""Ranks and their messages. Every collective of the product is here."""
