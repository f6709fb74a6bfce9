"""How well recommenders rank, by dense part and by size."""
