"""Pipelines as data: strategies, their proof, their replay."""
