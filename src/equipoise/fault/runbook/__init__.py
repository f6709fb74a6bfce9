"""Guides for people in trouble: written as Markdown, checked like code, run on a run's journal."""
