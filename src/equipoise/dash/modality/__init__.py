"""Pictures of images and sound on the ranks that encode them."""
