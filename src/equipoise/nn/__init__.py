"""The model as single-device code. No file here knows that other ranks exist."""
