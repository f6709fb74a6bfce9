"""How closely something in a search's queue was looked at.

An item is a bound, a stage and a place: of groups and families among the members of the search,
of rows in its space. Of the same bound, what was looked at less comes first.
"""

GROUP, FAMILY, BOUNDED, ROW, SPLIT, OWN = range(6)
"""A group of choices that run the same kernels; a family, as a part of its group, then for itself;
a row, as a part of its family, with layers on their stages, then with its own messages."""

Item = tuple[float, int, int]
"""Bound [s], stage, place."""
