"""Who is told how far something has come."""

from typing import Protocol


class Progress(Protocol):
    """Who shows how far a long action is. ``total`` and ``amount`` have one unit."""

    def start(self, label: str, total: int) -> None:
        """An action begins."""

    def advance(self, amount: int = 1) -> None:
        """So much more of it is done."""

    def finish(self) -> None:
        """It ended, well or not."""


class SilentProgress:
    """Shows nothing."""

    def start(self, label: str, total: int) -> None:
        """Nothing."""

    def advance(self, amount: int = 1) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""
