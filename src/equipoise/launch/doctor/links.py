"""Checks between ranks: latency, bandwidth, and how far apart the clocks are."""

import statistics

from equipoise.base.units import format_bytes, format_seconds
from equipoise.launch.doctor.facts import LinkFacts, Row

_DEAD_S = 15.0
"""torch 2.13, ``dynamic_rendezvous.py``: ``keep_alive_interval`` x ``keep_alive_max_attempt``."""

_APART_S = 0.01
"""With clocks further apart, messages in a trace would arrive before they were sent."""

_SKEW = 2.0


def link_rows(facts: LinkFacts) -> list[Row]:
    """The checks of ranks that met."""
    return [_latency(facts), _bandwidth(facts), _offsets(facts)]


def _short(value_s: float) -> str:
    return f"{1e6 * value_s:.0f} us" if abs(value_s) < 1e-3 else format_seconds(value_s)


def _over(values: tuple[float, ...]) -> str:
    return "one rank" if len(values) == 1 else f"median of {len(values)} ranks"


def _latency(facts: LinkFacts) -> Row:
    worst = max(facts.latency_s)
    rank = facts.latency_s.index(worst) + 1
    usual = statistics.median(facts.latency_s)
    fact = f"{_short(usual)} one way, {_over(facts.latency_s)}"
    why = "every collective waits at least so long, more than once."
    if worst <= _SKEW * usual:
        return Row("link latency", fact, "ok", why)
    fact += f"; rank {rank} on {facts.hosts[rank]} {_short(worst)}"
    fix = f"Look for other load on {facts.hosts[rank]}, or a longer path to it."
    return Row("link latency", fact, "warn", why, fix)


def _bandwidth(facts: LinkFacts) -> Row:
    worst = min(facts.bytes_per_s)
    rank = facts.bytes_per_s.index(worst) + 1
    usual = statistics.median(facts.bytes_per_s)
    fact = f"{format_bytes(usual)}/s from rank 0, {_over(facts.bytes_per_s)}"
    why = "a collective is as slow as the slowest link it crosses."
    if worst * _SKEW >= usual:
        return Row("link bandwidth", fact, "ok", why)
    fact += f"; to rank {rank} on {facts.hosts[rank]} {format_bytes(worst)}/s"
    fix = f"Look for other load on {facts.hosts[rank]}, or leave it out."
    return Row("link bandwidth", fact, "warn", why, fix)


def _offsets(facts: LinkFacts) -> Row:
    sizes = [abs(offset) for offset in facts.offset_s]
    worst = max(sizes)
    rank = sizes.index(worst) + 1
    error = facts.offset_error_s[rank - 1]
    host = facts.hosts[rank]
    fact = f"at most {_short(worst)} (rank {rank} on {host}), known to {_short(error)}"
    why = "journals and traces of ranks are laid on one time; torchrun drops nodes 15 s behind."
    fix = f"Start chronyd, ntpd or systemd-timesyncd on {host} and on {facts.hosts[0]}."
    if worst >= _DEAD_S:
        return Row("clock offsets", fact, "breaks", why, fix)
    # The uncertainty of the round trip must not count against a clock.
    if worst - error > _APART_S:
        return Row("clock offsets", fact, "warn", why, fix)
    return Row("clock offsets", fact, "ok", why)
