"""The few numbers that say how a run went, and the sentences that say them.

Why
    A page of figures is read in ten seconds or not at all. Every figure therefore has one
    sentence with its numbers, and the page has one above all. They are computed here, in
    plain Python that a test can check, not in the page.

What is measured
    Means leave out the *first step of each session*: it pays for warming up caches,
    allocators and kernels, and would be most of a short run. ``skew`` of a step is its
    fullest rank's seconds over the mean rank's; a run's skew is the mean over steps.
    Errors are medians of ``|measured - predicted| / measured``.

Kept true (tests/unit/dash/test_summary.py)
    A ratio between runs is taken over the steps that both have, and only where they
    trained the same documents; anything else is compared by tokens a second. What was
    predicted of a run against an in-order one is taken from one run's prices alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.units import format_bytes, format_count
from equipoise.observe.reader import Floats, RunRecord

IN_ORDER = "in-order"


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers; NaN where the journal does not tell. Keys of ``report --json``."""

    label: str
    folder: str
    policy: str
    ranks: int
    steps: int
    tokens: float
    loss: float
    step_s: float
    predicted_step_s: float
    tokens_per_s: float
    mfu: float
    skew: float
    predicted_skew: float
    in_order_skew: float
    wait_share: float
    step_error: float
    busy_error: tuple[float, ...]
    plan_s: float
    peak_memory_bytes: float
    forecast_bytes: float
    stop: str | None
    faults: int

    def as_json(self) -> dict[str, Any]:
        """Plain values, None for NaN."""
        return {key: _plain(value) for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run against another: how many times faster a step is, or a token where steps differ."""

    baseline: str
    label: str
    measured: float
    predicted: float
    steps: int
    is_same_documents: bool
    differs_in: tuple[str, ...]
    """Keys of run.toml whose values differ, the name left out."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, None for NaN."""
        return {key: _plain(value) for key, value in asdict(self).items()}


def steady_steps(record: RunRecord) -> NDArray[np.bool_]:
    """bool[step]: not the first step of a session; every step where there is no other."""
    steady = np.ones(record.step.size, dtype=np.bool_)
    for start_t in record.start_t:
        after = np.flatnonzero(record.t >= start_t)
        if after.size:
            steady[after[0]] = False
    return steady if steady.any() else np.ones_like(steady)


def labels(records: Sequence[RunRecord]) -> list[str]:
    """What tells the runs apart: the policy, else the name, else the folder, else a number."""
    choices = (
        [record.start.policy for record in records],
        [str(record.start.spec.get("name", record.folder.name)) for record in records],
        [record.folder.name for record in records],
        [str(record.folder) for record in records],
    )
    for choice in choices:
        if len(set(choice)) == len(records):
            return choice
    return [f"{record.folder} ({number})" for number, record in enumerate(records, start=1)]


def skew_of(seconds: Floats) -> Floats:
    """Max over mean of each step's ranks; NaN for a step of which no rank is known."""
    answer = np.full(seconds.shape[0], np.nan)
    known = ~np.isnan(seconds).all(axis=1) if seconds.size else np.zeros(0, dtype=np.bool_)
    if known.any():
        mean = np.nanmean(seconds[known], axis=1)
        answer[known] = np.nanmax(seconds[known], axis=1) / np.where(mean > 0, mean, np.nan)
    return answer


def wait_share_of(record: RunRecord) -> Floats:
    """Share of each step's rank-seconds that was spent waiting."""
    answer = np.full(record.step.size, np.nan)
    known = ~np.isnan(record.wait_s).all(axis=1) if record.wait_s.size else answer.astype(bool)
    if record.step.size and known.any():
        answer[known] = np.nanmean(record.wait_s[known], axis=1) / record.step_s[known]
    return answer


def summarize(record: RunRecord, label: str) -> Summary:
    """The numbers of one run, over its steady steps."""
    steady = steady_steps(record)
    seconds = float(np.nansum(record.step_s[steady]))
    peak = record.peak_memory_bytes
    return Summary(
        label=label,
        folder=str(record.folder),
        policy=record.start.policy,
        ranks=record.ranks,
        steps=int(record.step.size),
        tokens=_last(record.tokens_seen),
        loss=_last(record.loss),
        step_s=_mean(record.step_s[steady]),
        predicted_step_s=_mean(record.predicted_step_s[steady]),
        tokens_per_s=(
            float(np.nansum(record.tokens[steady])) / seconds if seconds > 0 else math.nan
        ),
        mfu=(
            float(np.nansum((record.mfu * record.step_s)[steady])) / seconds
            if seconds > 0 and not np.isnan(record.mfu[steady]).all()
            else math.nan
        ),
        skew=_mean(skew_of(record.busy_s)[steady]),
        predicted_skew=_mean(record.skew[steady]),
        in_order_skew=_mean(record.in_order_skew[steady]),
        wait_share=_mean(wait_share_of(record)[steady]),
        step_error=_error(record.step_s[steady], record.predicted_step_s[steady]),
        busy_error=tuple(
            _error(record.busy_s[steady, rank], record.predicted_s[steady, rank])
            for rank in range(record.ranks)
        ),
        plan_s=_mean(record.plan_s[steady]),
        peak_memory_bytes=float(np.nanmax(peak)) if not np.isnan(peak).all() else math.nan,
        forecast_bytes=record.memory.forecast_bytes if record.memory else math.nan,
        stop=record.stop.reason if record.stop else None,
        faults=len(record.faults),
    )


def baseline_of(records: Sequence[RunRecord]) -> int:
    """The run that others are held against: the one that packed in order, else the first."""
    in_order = [index for index, record in enumerate(records) if record.start.policy == IN_ORDER]
    return in_order[0] if len(in_order) == 1 else 0


def compare(
    baseline: RunRecord, record: RunRecord, *, baseline_label: str, label: str
) -> Comparison:
    """Hold ``record`` against ``baseline``: a ratio above 1 means that ``record`` is faster."""
    common, ours, theirs = np.intersect1d(record.step, baseline.step, return_indices=True)
    is_same = (
        bool(common.size)
        and bool(np.array_equal(record.tokens[ours], baseline.tokens[theirs]))
        and record.start.corpus == baseline.start.corpus
        and _setting(record, "train", "seed") == _setting(baseline, "train", "seed")
        and record.ranks == baseline.ranks
    )
    if is_same:
        steady = steady_steps(record)[ours] & steady_steps(baseline)[theirs]
        steady = steady if steady.any() else np.ones_like(steady)
        ours, theirs = ours[steady], theirs[steady]
    else:
        ours, theirs = steady_steps(record).nonzero()[0], steady_steps(baseline).nonzero()[0]

    def seconds_a_token(of: RunRecord, rows: NDArray[np.intp], seconds: Floats) -> float:
        known = rows[~np.isnan(seconds[rows]) & ~np.isnan(of.tokens[rows])]
        tokens = float(of.tokens[known].sum())
        return float(seconds[known].sum()) / tokens if tokens > 0 else math.nan

    def ratio(theirs_s: float, ours_s: float) -> float:
        return theirs_s / ours_s if ours_s > 0 else math.nan

    foreseen_s = baseline.predicted_step_s
    if is_same and baseline.start.policy == IN_ORDER:
        # Each run measured its own prices, and a machine is not twice the same: the ratio is
        # taken within one run, which also foresaw what in order would have cost.
        foreseen_s = np.full(baseline.step.size, np.nan)
        foreseen_s[theirs] = _in_order_step_s(record)[ours]
    return Comparison(
        baseline=baseline_label,
        label=label,
        measured=ratio(
            seconds_a_token(baseline, theirs, baseline.step_s),
            seconds_a_token(record, ours, record.step_s),
        ),
        predicted=ratio(
            seconds_a_token(baseline, theirs, foreseen_s),
            seconds_a_token(record, ours, record.predicted_step_s),
        ),
        steps=int(ours.size),
        is_same_documents=is_same,
        differs_in=tuple(
            sorted(
                key
                for key, (one, other) in _pairs(record.start.spec, baseline.start.spec).items()
                if one != other and key != "name"
            )
        ),
    )


def _in_order_step_s(record: RunRecord) -> Floats:
    """Seconds of each step that the run foresaw for an in-order pack of its documents."""
    beside_compute_s = record.predicted_step_s - record.longest_s
    answer: Floats = record.in_order_longest_s + beside_compute_s
    return answer


def compare_all(records: Sequence[RunRecord], names: Sequence[str]) -> list[Comparison]:
    """Every other run against the baseline, in the order given."""
    base = baseline_of(records)
    return [
        compare(records[base], record, baseline_label=names[base], label=names[index])
        for index, record in enumerate(records)
        if index != base
    ]


def headline(summaries: Sequence[Summary], comparisons: Sequence[Comparison]) -> str:
    """The page in one sentence with its numbers."""
    known = [each for each in comparisons if not math.isnan(each.measured)]
    if known:
        # What was run on the same documents says more than any ratio that was not.
        best = max(known, key=lambda each: (each.is_same_documents, each.measured))
        return _same_documents(best) if best.is_same_documents else _other_documents(best)
    return _alone(summaries[0])


def _same_documents(best: Comparison) -> str:
    measured, predicted, word = best.measured, best.predicted, "faster"
    if measured < 1:
        measured, predicted, word = 1 / measured, 1 / predicted, "slower"
    return (
        f"{best.label} is {measured:.2f}× {word} per step than {best.baseline} on the same "
        f"documents{_foreseen('; predicted {}', predicted)}."
    )


def _other_documents(best: Comparison) -> str:
    keys = best.differs_in[:3] + (("more",) if len(best.differs_in) > 3 else ())
    differ = f" The runs differ in {_listed(keys)}." if keys else " Their documents differ."
    return (
        f"{best.label} trains {best.measured:.2f}× the tokens a second of {best.baseline}"
        f"{_foreseen('; predicted {}', best.predicted)}.{differ}"
    )


def _alone(only: Summary) -> str:
    if only.steps == 0:
        return f"{only.label} has not finished a step yet."
    if only.ranks == 1 or math.isnan(only.skew):
        where = "one rank" if only.ranks == 1 else f"{only.ranks} ranks"
        error = _percent(only.step_error)
        foreseen = (
            f"; half of its steps took what was predicted to within {error}"
            if not math.isnan(only.step_error)
            else ""
        )
        rate = format_count(only.tokens_per_s)
        return f"{only.label} trains {rate} tokens a second on {where}{foreseen}."
    is_in_order = only.policy == IN_ORDER
    otherwise = "" if is_in_order else _foreseen("; in order it would be {}", only.in_order_skew)
    return (
        f"Packed {'in order' if is_in_order else only.policy}, the fullest of {only.ranks} ranks "
        f"works {only.skew:.2f}× the mean{_foreseen(', predicted {}', only.predicted_skew)}"
        f"{otherwise}."
    )


def _foreseen(clause: str, times: float) -> str:
    """The clause around a ratio; nothing where the ratio is unknown."""
    return "" if math.isnan(times) else clause.format(f"{times:.2f}×")


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def findings(records: Sequence[RunRecord], summaries: Sequence[Summary]) -> dict[str, str]:
    """One sentence for each figure, by the figure's name; none where there is nothing to say."""
    worst = {
        one.label: _highest(skew_of(record.busy_s)[steady_steps(record)])
        for record, one in zip(records, summaries, strict=True)
    }
    one_total = len({one.tokens for one in summaries}) == 1

    def busy_error(one: Summary) -> float:
        return _highest(np.array(one.busy_error))

    def loss(one: Summary) -> str:
        after = "" if one_total else f" (after {format_count(one.tokens)} tokens)"
        return f"{one.loss:.3f}{after}"

    def clauses(
        value: Callable[[Summary], float], shown: Callable[[Summary], str], unit: str = ""
    ) -> str:
        """``3.1% of the peak with A, 2.9% with B``, of the runs that have the value."""
        known = [one for one in summaries if not math.isnan(value(one))]
        texts = [f"{shown(one)}{'' if index else unit}" for index, one in enumerate(known)]
        if len(summaries) > 1:
            texts = [f"{text} with {one.label}" for text, one in zip(texts, known, strict=True)]
        return ", ".join(texts)

    only = summaries[0]
    in_order = (
        _foreseen("; packed in order it would be {}", only.in_order_skew)
        if len(summaries) == 1 and only.policy != IN_ORDER
        else ""
    )
    total = f"After {format_count(only.tokens)} tokens the loss" if one_total else "Loss"
    told = {
        "work": (
            "On an average step the fullest rank works {}" + in_order + ".",
            clauses(lambda one: one.skew, lambda one: f"{one.skew:.2f}×", " the mean"),
        ),
        "skew": (
            "On the worst step the fullest rank works {}.",
            clauses(
                lambda one: worst[one.label], lambda one: f"{worst[one.label]:.2f}×", " the mean"
            ),
        ),
        "steps": (
            "Half of all steps take what was predicted to within {}.",
            clauses(lambda one: one.step_error, lambda one: _percent(one.step_error)),
        ),
        "errors": (
            "On half of all steps even the worst rank's compute is foreseen to within {}.",
            clauses(busy_error, lambda one: _percent(busy_error(one))),
        ),
        "wait": (
            "Ranks wait {}.",
            clauses(
                lambda one: one.wait_share, lambda one: _percent(one.wait_share), " of their time"
            ),
        ),
        "throughput": (
            "The ranks together train {}.",
            clauses(
                lambda one: one.tokens_per_s,
                lambda one: format_count(one.tokens_per_s),
                " tokens a second",
            ),
        ),
        "mfu": (
            "The model's own FLOP come to {}.",
            clauses(lambda one: one.mfu, lambda one: _percent(one.mfu), " of the peak"),
        ),
        "loss": (total + " is {}.", clauses(lambda one: one.loss, loss)),
        "memory": (
            "The fullest rank peaks at {}.",
            clauses(lambda one: one.peak_memory_bytes, _memory_clause),
        ),
    }
    answer = {name: sentence.format(text) for name, (sentence, text) in told.items() if text}
    if lengths := _lengths_finding(records[0].start.corpus):
        answer["lengths"] = lengths
    if max(one.ranks for one in summaries) > 1:
        answer["timeline"] = "Hatched is waiting: a rank is done before another."
        if any(int(str(_setting(record, "layout", "pipeline") or 1)) > 1 for record in records):
            answer["timeline"] += " Gaps inside a pipeline's step are its bubble."
    return answer


def _lengths_finding(corpus: Mapping[str, Any]) -> str:
    histogram = corpus.get("histogram") or {}
    edges, documents, tokens = (
        np.array(histogram.get(key) or [], dtype=np.float64)
        for key in ("edges", "documents", "tokens")
    )
    if not tokens.size or tokens.sum() <= 0:
        return ""
    # Tokens of documents at least as long as each edge, as a share.
    above = tokens[::-1].cumsum()[::-1] / tokens.sum()
    bin_ = int(np.flatnonzero(above >= 0.5)[-1])
    share = documents[bin_:].sum() / documents.sum()
    return (
        f"The {_percent(share)} of documents that are {edges[bin_]:,.0f} tokens or longer hold "
        f"{_percent(above[bin_])} of all tokens."
    )


def _memory_clause(one: Summary) -> str:
    text = format_bytes(one.peak_memory_bytes)
    if math.isnan(one.forecast_bytes):
        return text
    off = one.forecast_bytes / one.peak_memory_bytes - 1
    signed = f"{off:+.0%}".replace("-", "−")
    return f"{text} (forecast {format_bytes(one.forecast_bytes)}, {signed})"


def _percent(share: float) -> str:
    if math.isnan(share):
        return "an unknown share"
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def _setting(record: RunRecord, section: str, key: str) -> object:
    table = record.start.spec.get(section)
    return table.get(key) if isinstance(table, dict) else None


def flat(spec: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys.

    >>> flat({"name": "run", "pack": {"policy": "by-work"}})
    {'name': 'run', 'pack.policy': 'by-work'}
    """
    answer: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, dict):
            answer |= flat(value, f"{prefix}{key}.")
        else:
            answer[f"{prefix}{key}"] = value
    return answer


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    ours, theirs = flat(one), flat(other)
    return {key: (ours.get(key), theirs.get(key)) for key in ours.keys() | theirs.keys()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _fullest(seconds: Floats) -> Floats:
    """The greatest of each step's ranks; NaN where one is unknown."""
    answer: Floats = seconds.max(axis=1)
    return answer


def _highest(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if known.size else math.nan


def _last(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known[-1]) if known.size else math.nan


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def _error(measured: Floats, predicted: Floats) -> float:
    """Median of |measured - predicted| / measured, where both are known."""
    known = ~np.isnan(measured) & ~np.isnan(predicted) & (measured > 0)
    if not known.any():
        return math.nan
    return float(np.median(np.abs(measured - predicted)[known] / measured[known]))
