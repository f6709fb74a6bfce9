"""Number formats: how tensors are rounded to them, and products of what was rounded."""
