"""Run a trace of requests through replicas of a serving engine.

What it decides
    A request goes to the replica with the least predicted work when it arrives; the lowest number
    breaks ties. A request that no replica could ever run is refused, and counted.

    *Together*, every replica computes prompts and generates. *Apart*, some replicas only compute
    prompts and sample the first token; then keys and values are sent to one that generates, which
    it reaches when they have all arrived. A replica sends one request's after the other's, in the
    order of their first tokens. Pages of a prompt that is being sent count as free.

    Requests of one prefix group and tenant share the whole pages of their common tokens; their
    last common page, if it is not whole, is everybody's own. Replicas that only generate share
    none.

Kept true (tests/unit/sim/serve/test_run.py, tests/unit/sim/serve/test_apart.py)
    All tokens in come out; Little's law; the same trace gives the same times, in whatever order
    its lines stand.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equipoise.base.errors import FitError
from equipoise.cost.serving import StagedPrice
from equipoise.data.progress import Progress, SilentProgress
from equipoise.schedule.batching.fair.policy import MakePolicy
from equipoise.schedule.batching.request import QueueFullError, ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings, require_possible
from equipoise.sim.serve.lane import MANY, Ended
from equipoise.sim.serve.record import ReplicaRecord, RequestRecord
from equipoise.sim.serve.replica import ClockPrice, Replica, make_replica
from equipoise.spec.request_trace import TracedRequest


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas that are alike."""

    settings: BatchSettings
    """Limits of each scheduler."""
    price: ClockPrice | StagedPrice
    """The clock."""
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class ServedTrace:
    """A trace that has run to its end."""

    requests: tuple[RequestRecord, ...]
    """Those that were served, by arrival."""
    refused: tuple[TracedRequest, ...]
    replicas: tuple[ReplicaRecord, ...]
    """Those that compute prompts; all, where prompts and generation are together."""
    decoders: tuple[ReplicaRecord, ...] = ()
    """Those that only generate."""
    sent: tuple[tuple[int, float], ...] = ()
    """Tokens of each request that was sent to them, and the time until all had arrived [s]."""

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
    price: ClockPrice | StagedPrice,
    make_policy: MakePolicy,
    *,
    replicas: int = 1,
    at_once: bool = True,
    progress: Progress | None = None,
    ended: Ended | None = None,
) -> ServedTrace:
    """Serve a trace, prompts and generation together.

    Args:
        trace: Requests in any order.
        settings: Of each scheduler.
        price: The clock.
        make_policy: Policy of fairness of each scheduler.
        replicas: How many serve beside each other.
        at_once: Whether iterations that only continue the same decodes are decided at once; the
            times are the same either way.
        progress: Shown while requests arrive.
        ended: Called with each request that ends; what it raises ends the run.
    """
    pool = Pool(settings, price, replicas)
    return _TraceRun(pool, None, make_policy, at_once=at_once, ended=ended).serve(trace, progress)


def run_apart(
    trace: Sequence[TracedRequest],
    prompts: Pool,
    outputs: Pool,
    send_s: Callable[[int], float],
    make_policy: MakePolicy,
    *,
    at_once: bool = True,
    progress: Progress | None = None,
    ended: Ended | None = None,
) -> ServedTrace:
    """Serve a trace, prompts on some replicas and generation on others.

    Args:
        trace: Requests in any order.
        prompts: Replicas that compute prompts.
        outputs: Replicas that generate.
        send_s: What it takes to send the keys and values of a number of tokens [s].
        make_policy: Policy of fairness of each scheduler.
        at_once: As for ``run_trace``.
        progress: Shown while requests arrive.
        ended: As for ``run_trace``.
    """

    def ended_first(record: RequestRecord) -> None:
        if ended is not None and record.here_tokens == record.traced.output_tokens:
            ended(record)

    run = _TraceRun(prompts, outputs.settings, make_policy, at_once=at_once, ended=ended_first)
    first = run.serve(trace, progress)
    served, sent = _send(first.requests, prompts.replicas, send_s)
    generating = _replicas(outputs, make_policy, at_once=at_once, ended=ended)
    refused: set[str] = set()
    for arrival_s, record in served:
        traced = record.traced
        request = ServeRequest(
            record.id,
            traced.tenant,
            arrival_s,
            traced.prompt_tokens + 1,
            max(traced.most_tokens, traced.output_tokens) - 1,
            given_tokens=traced.prompt_tokens,
        )
        try:
            _submit(generating, request, record)
        except QueueFullError:
            refused.add(record.id)
    _end(generating)
    return ServedTrace(
        tuple(each for each in first.requests if each.id not in refused),
        (*first.refused, *(each.traced for each in first.requests if each.id in refused)),
        first.replicas,
        tuple(each.record for each in generating),
        sent,
    )


class _TraceRun:
    """A trace on replicas, all of it or its prompts."""

    def __init__(
        self,
        pool: Pool,
        decoders: BatchSettings | None,
        make_policy: MakePolicy,
        *,
        at_once: bool,
        ended: Ended | None,
    ) -> None:
        self._settings, self._decoders = pool.settings, decoders
        self._serving = _replicas(pool, make_policy, at_once=at_once, ended=ended)

    def serve(self, trace: Sequence[TracedRequest], progress: Progress | None) -> ServedTrace:
        """Every request, by arrival."""
        progress = progress or SilentProgress()
        progress.start("serve", len(trace))
        records: list[RequestRecord] = []
        refused: list[TracedRequest] = []
        for number, traced in enumerate(sorted(trace)):
            progress.advance()
            record = RequestRecord(f"{number:08d}", traced, 0, traced.output_tokens)
            try:
                request = self._request(record)
                record.replica = _submit(self._serving, request, record)
            except (FitError, QueueFullError):
                refused.append(traced)
                continue
            records.append(record)
        _end(self._serving)
        progress.finish()
        replicas = tuple(each.record for each in self._serving)
        return ServedTrace(tuple(records), tuple(refused), replicas)

    def _request(self, record: RequestRecord) -> ServeRequest:
        traced, size = record.traced, self._settings.page_tokens
        group = traced.prefix_group.encode()
        # What a request may generate is known to the scheduler, what it will is not.
        most = max(traced.most_tokens, traced.output_tokens) if traced.output_tokens else 0
        request = ServeRequest(
            record.id,
            traced.tenant,
            traced.arrival_s,
            traced.prompt_tokens,
            most,
            tuple(b"%s/%d" % (group, page) for page in range(traced.prefix_tokens // size)),
        )
        if self._decoders is None or not traced.output_tokens:
            return request
        require_possible(request, self._decoders)
        record.here_tokens = 1
        return dataclasses.replace(request, most_tokens=1)


def _send(
    records: Sequence[RequestRecord], replicas: int, send_s: Callable[[int], float]
) -> tuple[list[tuple[float, RequestRecord]], tuple[tuple[int, float], ...]]:
    """When each request that generates further tokens reaches those that do, in that order."""
    free_s = [0.0] * replicas
    arrivals, sent = [], []
    for record in sorted(records, key=lambda each: (each.first_s, each.id)):
        if record.here_tokens == record.traced.output_tokens:
            continue
        tokens = record.traced.prompt_tokens
        free_s[record.replica] = max(free_s[record.replica], record.first_s) + send_s(tokens)
        arrivals.append((free_s[record.replica], record))
        sent.append((tokens, free_s[record.replica] - record.first_s))
    return sorted(arrivals, key=lambda pair: (pair[0], pair[1].id)), tuple(sent)


def _replicas(
    pool: Pool, make_policy: MakePolicy, *, at_once: bool, ended: Ended | None
) -> list[Replica]:
    def make_scheduler() -> Scheduler:
        return Scheduler(pool.settings, pool.price, make_policy)

    most = MANY if at_once else 1
    return [
        make_replica(make_scheduler, pool.price, at_once=most, ended=ended)
        for _ in range(pool.replicas)
    ]


def _submit(serving: Sequence[Replica], request: ServeRequest, record: RequestRecord) -> int:
    """Give a request to the replica with the least work; returns which."""
    for each in serving:
        each.run_until(request.arrival_s)
    at = min(range(len(serving)), key=lambda index: serving[index].backlog_s)
    serving[at].submit(request, record)
    return at


def _end(serving: Sequence[Replica]) -> None:
    for each in serving:
        each.run_until(float("inf"))
        each.close()
