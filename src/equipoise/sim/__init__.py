"""Floor 6: the product's own schedules, replayed on a machine that is not there. No torch."""
