"""Pictures of serving."""
