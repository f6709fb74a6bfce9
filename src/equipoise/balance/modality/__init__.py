"""Items (images, sound) dealt to the ranks that encode them, by work; integers, no torch."""
