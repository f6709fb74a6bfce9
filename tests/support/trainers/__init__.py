"""Small trainers of other libraries."""
