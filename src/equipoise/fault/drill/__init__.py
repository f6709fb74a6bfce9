"""Rehearse faults on a user's own configuration: inject, watch, compare with an undisturbed run."""
