"""Numbers settled before a step: what routers choose, and prices by which auto chooses."""
