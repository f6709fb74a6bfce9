"""The product's own schedules, replayed on a machine that is not there. No torch."""
