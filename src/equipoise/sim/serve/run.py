"""Run a trace of requests through replicas of a serving engine.

What it decides
    A request goes to the replica with the least predicted work when it arrives; the lowest number
    breaks ties. A request that no replica could ever run is refused, and counted.

    Requests of one prefix group and tenant share the whole pages of their common tokens; their
    last common page, if it is not whole, is everybody's own.

Kept true (tests/unit/sim/serve/test_run.py)
    All tokens in come out; Little's law; the same trace gives the same times, in whatever order
    its lines stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.base.errors import FitError
from equipoise.data.progress import Progress, SilentProgress
from equipoise.schedule.batching.fair.policy import MakePolicy
from equipoise.schedule.batching.request import QueueFullError, ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.sim.serve.record import ReplicaRecord, RequestRecord
from equipoise.sim.serve.replica import ClockPrice, Replica
from equipoise.spec.request_trace import TracedRequest


@dataclass(frozen=True, slots=True)
class ServedTrace:
    """A trace that has run to its end."""

    requests: tuple[RequestRecord, ...]
    """Those that were served, by arrival."""
    refused: tuple[TracedRequest, ...]
    replicas: tuple[ReplicaRecord, ...]

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token [s]."""
        if not self.requests:
            return 0.0
        begin_s = min(each.traced.arrival_s for each in self.requests)
        return max(each.end_s for each in self.requests) - begin_s


def run_trace(
    trace: Sequence[TracedRequest],
    settings: BatchSettings,
    price: ClockPrice,
    make_policy: MakePolicy,
    *,
    replicas: int = 1,
    at_once: bool = True,
    progress: Progress | None = None,
) -> ServedTrace:
    """Serve a trace.

    Args:
        trace: Requests in any order.
        settings: Of each replica's scheduler.
        price: The clock.
        make_policy: Policy of fairness of each replica.
        replicas: How many serve beside each other.
        at_once: Whether iterations that only continue the same decodes are decided at once; the
            times are the same either way.
        progress: Shown while requests arrive.
    """
    progress = progress or SilentProgress()
    progress.start("serve", len(trace))
    serving = [
        Replica(
            Scheduler(settings, price, make_policy), price, **({} if at_once else {"at_once": 1})
        )
        for _ in range(replicas)
    ]
    records: list[RequestRecord] = []
    refused: list[TracedRequest] = []
    for number, traced in enumerate(sorted(trace)):
        progress.advance()
        for each in serving:
            each.run_until(traced.arrival_s)
        at = min(range(replicas), key=lambda index: serving[index].scheduler.backlog_s)
        record = RequestRecord(f"{number:08d}", traced, at)
        try:
            serving[at].submit(_request(record, settings.page_tokens), record)
        except (FitError, QueueFullError):
            refused.append(traced)
            continue
        records.append(record)
    for each in serving:
        each.run_until(float("inf"))
        each.record.hit_tokens = each.scheduler.cache_tokens[0]
    progress.finish()
    return ServedTrace(tuple(records), tuple(refused), tuple(each.record for each in serving))


def _request(record: RequestRecord, page_tokens: int) -> ServeRequest:
    traced = record.traced
    pages = traced.prefix_tokens // page_tokens
    group = traced.prefix_group.encode()
    return ServeRequest(
        record.id,
        traced.tenant,
        traced.arrival_s,
        traced.prompt_tokens,
        # What a request may generate is known to the scheduler, what it will is not.
        max(traced.most_tokens, traced.output_tokens) if traced.output_tokens else 0,
        tuple(b"%s/%d" % (group, page) for page in range(pages)),
    )
