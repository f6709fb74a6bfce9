"""Recommenders: the page of a run, and where embedding tables lie as a picture."""
