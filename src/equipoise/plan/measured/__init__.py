"""Search by real runs: which choice to measure next, and what was measured."""
