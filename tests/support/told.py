"""Progresses that remember what they were told."""

from equipoise.data.progress import SilentProgress


class Told(SilentProgress):
    """Notes how far a stage has come."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.done = 0

    def start(self, label: str, total: int) -> None:
        self.stages.append((label, total))

    def advance(self, amount: int) -> None:
        self.done += amount


class Stages:
    """Counts stages, and wants all of them done at the end."""

    total = done = 0

    def start(self, label: str, total: int) -> None:
        self.total = total

    def advance(self, amount: int = 1) -> None:
        self.done += amount

    def finish(self) -> None:
        assert self.done == self.total
