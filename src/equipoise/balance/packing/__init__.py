"""Packing: a step's pieces of documents in, every rank's micro-batches out."""
