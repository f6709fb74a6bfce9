"""Pictures of experts over ranks."""
