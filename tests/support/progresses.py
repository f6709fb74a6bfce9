"""Progress displays that record what a stage reports to them."""

from equipoise.data.progress import SilentProgress


class RecordedProgress(SilentProgress):
    """Keeps the label and total of every stage, and the sum of their progress."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.done = 0

    def start(self, label: str, total: int) -> None:
        self.stages.append((label, total))

    def advance(self, amount: int) -> None:
        self.done += amount


class CountedStages:
    """Counts stages, and checks at the end that all of them are done."""

    total = done = 0

    def start(self, label: str, total: int) -> None:
        self.total = total

    def advance(self, amount: int = 1) -> None:
        self.done += amount

    def finish(self) -> None:
        assert self.done == self.total
