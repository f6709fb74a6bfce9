"""Redistribution of one tensor as data: placements, steps, the cheapest path."""
