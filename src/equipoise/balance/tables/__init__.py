"""Embedding tables onto ranks: whole, by rows, by columns, inside a host, or everywhere."""
