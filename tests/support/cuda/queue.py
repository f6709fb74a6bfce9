"""A device's queue that passes each event some time after the one before."""


class Queue:
    """A device in whose queue each event is passed 5 ms after the one before."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waits = 0

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.at_ms = queue, -1.0

    def record(self) -> None:
        self.at_ms = 5.0 * self.queue.recorded
        self.queue.recorded += 1

    def synchronize(self) -> None:
        self.queue.waits += 1

    def elapsed_time(self, end_event: "Event") -> float:
        return end_event.at_ms - self.at_ms
