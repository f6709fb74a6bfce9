"""Rows in a file of blocks behind a cache in memory: tables larger than the memory."""
