"""Displays of progress."""

from typing import Protocol


class Progress(Protocol):
    """Shows how far a long action has come. ``total`` and ``amount`` have the same unit."""

    def start(self, label: str, total: int) -> None:
        """An action begins."""

    def advance(self, amount: int = 1) -> None:
        """``amount`` more of it is done."""

    def finish(self) -> None:
        """It ended, successfully or not."""


class SilentProgress:
    """Shows nothing."""

    def start(self, label: str, total: int) -> None:
        """Nothing."""

    def advance(self, amount: int = 1) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""
