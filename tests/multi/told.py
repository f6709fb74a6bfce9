"""A progress that remembers what it was told."""

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
