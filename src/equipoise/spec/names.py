"""Names of files that several rooms look for."""

from pathlib import Path

RESOLVED = "resolved.json"
"""The resolved run, in a run's folder."""

TOKENIZER_FILE = "tokenizer.json"
"""A tokenizer, in a model's folder."""

HF = "hf"
"""What a run keeps of the model that it began from, in a run's folder."""

CHECKPOINTS = "checkpoint"
"""A run's checkpoints, in its folder."""

EXPERT_FILES = "experts"
"""Experts that have no memory, in a run's folder; nothing once the run has ended."""

RECOMMEND = "recommend.json"
"""The record of a recommender's run, in its folder."""

RANKED = "spec.json"
"""What the ranks of a recommender's run obey, in its folder."""

LOW_BIT = "ranking.json"
"""What a folder says of itself that holds a recommender in few bits."""


def is_recommender(folder: Path) -> bool:
    """Whether a folder is that of a recommender's run, or holds one in few bits."""
    is_run = (folder / RANKED).is_file() and not (folder / RESOLVED).exists()
    return is_run or (folder / LOW_BIT).is_file()


def unread_record(file: Path, why: str) -> str:
    """The message for a record of a recommender's run that cannot be read."""
    return (
        f"{file} cannot be read: {why}. Delete it, and run the same `equipoise train` again, which "
        "writes it from the newest checkpoint."
    )
