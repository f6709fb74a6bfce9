"""Messages between the ranks of this process's group: how soon, how fast, and by whose clock.

What it decides
    Rank 0 talks to one rank after another. A rank's clock is read from the round trip that took
    least, as NTP does it: it lies within half of that trip of what is reported.

Under any torchrun, ``-m equipoise.cli.doctor.links`` prints what ``equipoise doctor --ranks``
would, of ranks on several nodes.

Kept true (tests/unit/cli/doctor/test_verb.py)
    Two ranks of one machine have one clock.
"""

import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist

from equipoise.base.errors import EquipoiseError
from equipoise.comm.group import Ranks, join_from_environment
from equipoise.launch.doctor.facts import LinkFacts

_ROUNDS = 64
_MESSAGE_BYTES = 8 << 20
_MESSAGES = 4
_DEADLINE_S = 60.0


def measure_links(ranks: Ranks) -> LinkFacts:
    """Latency, bandwidth and clock offset of every rank against rank 0; the same on every rank.

    Args:
        ranks: Two or more.

    Cost: some 30 ms a rank over gloo on one machine.
    """
    hosts = tuple(ranks.gather_objects(socket.gethostname()))
    rows = [_with_rank(ranks, other) for other in range(1, ranks.world)]
    gathered: list[list[tuple[float, float, float, float]]] = ranks.gather_objects(rows)
    latency_s, bytes_per_s, offset_s, error_s = zip(*gathered[0], strict=True)
    return LinkFacts(hosts, latency_s, bytes_per_s, offset_s, error_s)


def _with_rank(ranks: Ranks, other: int) -> tuple[float, float, float, float]:
    """One-way seconds, bytes a second, seconds that the other clock is ahead, and their error."""
    trips: list[tuple[float, float]] = []
    clock = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    for _ in range(_ROUNDS):
        if ranks.rank == 0:
            begin, began = time.perf_counter(), time.time()
            dist.send(clock, other)
            dist.recv(clock, other)
            theirs = float(clock.item())
            trip = time.perf_counter() - begin
            trips.append((trip, theirs - (began + trip / 2)))
        elif ranks.rank == other:
            dist.recv(clock, 0)
            clock.cpu()  # on an accelerator, what was received is here only now
            clock.fill_(time.time())
            dist.send(clock, 0)
    rates = [_send_s(ranks, other, clock) for _ in range(_MESSAGES)]
    if ranks.rank != 0:
        return 0.0, 0.0, 0.0, 0.0
    shortest, offset = min(trips)
    latency = statistics.median(trip for trip, _ in trips) / 2
    return latency, _MESSAGE_BYTES / min(rates), offset, shortest / 2


def _send_s(ranks: Ranks, other: int, answer: torch.Tensor) -> float:
    """Seconds until a large message has been acknowledged."""
    begin = time.perf_counter()
    if ranks.rank in (0, other):
        message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=ranks.device)
        begin = time.perf_counter()
        if ranks.rank == 0:
            dist.send(message, other)
            dist.recv(answer, other)
        else:
            dist.recv(message, 0)
            dist.send(answer, 0)
        answer.cpu()
    return time.perf_counter() - begin


def main() -> int:
    """Run as one rank under torchrun; rank 0 prints. Returns 5 if a clock would break a run."""
    from equipoise.cli.doctor.table import print_rows
    from equipoise.launch.doctor.checks import would_break
    from equipoise.launch.doctor.links import link_rows

    try:
        joined = join_from_environment({}, deadline_s=_DEADLINE_S, tell=lambda _: None)
        with joined as (ranks, _):
            if ranks.world == 1:
                return 0
            rows = link_rows(measure_links(ranks))
            if ranks.rank == 0:
                print_rows(rows)
    except EquipoiseError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 5 if would_break(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
