"""Equal shares among flows by their tags: start-time fair queueing.

What it decides
    A flow's tag is the work it was served over its weight. A flow that comes, or comes back, begins
    at the tag of the flow that is being served, so that idling earns nothing.

Sources
    Goyal, Vin, Cheng: Start-time Fair Queueing, SIGCOMM 1996.
"""


class ShareClock:
    """Tags of flows."""

    def __init__(self) -> None:
        self.now = 0.0
        """The tag at which flows begin."""
        self._tags: dict[str, float] = {}

    def join(self, flow: str) -> None:
        """A flow has work again."""
        self._tags[flow] = max(self.now, self._tags.get(flow, 0.0))

    def tag(self, flow: str) -> float:
        """Smaller is more deserving."""
        return self._tags[flow]

    def charge(self, flow: str, work: float, waiting: str | None) -> None:
        """A flow was served, while ``waiting`` was the most deserving of those that wait."""
        tag = self._tags[flow]
        reached = tag if waiting is None else min(tag, self._tags[waiting])
        self.now = max(self.now, reached)
        self._tags[flow] = tag + work

    def leave(self, flow: str, *, is_forgotten: bool) -> None:
        """A flow has no work left; one that may come back keeps its tag while that is ahead."""
        if is_forgotten or self._tags[flow] <= self.now:
            del self._tags[flow]
