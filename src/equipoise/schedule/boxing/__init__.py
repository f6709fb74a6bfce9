"""Redistribution of one tensor as data: placements, steps, the cheapest path. An island.

``equipoise explain boxing`` shows it, ``parallel.boxing`` runs it, and nothing that trains imports
either: whoever moves tensors between layouts of their own calls both by hand.
"""
