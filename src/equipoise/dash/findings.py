"""The sentences that say how runs went: one above all, and one for each figure.

Why
    A page of figures is read in ten seconds or not at all. Every figure therefore has one
    sentence with its numbers, and the page has one above all. They are written here, in
    plain Python that a test can check, not in the page.

Kept true (tests/unit/dash/test_summary.py)
    A sentence says nothing that the journal does not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.base.units import format_bytes, format_count, format_seconds
from equipoise.dash.compare import RunComparison, setting_of
from equipoise.dash.summary import (
    IN_ORDER,
    Summary,
    highest,
    measured_busy_s,
    skew_of,
    steady_steps,
)
from equipoise.dash.verdict import tell
from equipoise.observe.run_record import RunRecord

_NAMED_RANKS = 8
"""Most ranks whose shares a sentence names."""


def headline(summaries: Sequence[Summary], comparisons: Sequence[RunComparison]) -> str:
    """The page in one sentence with its numbers."""
    known = [each for each in comparisons if not math.isnan(each.measured)]
    if known:
        # Ratios on the same documents say more than any other.
        best = max(known, key=lambda each: (each.is_same_documents, each.measured))
        return tell(best)
    return _alone(summaries[0])


def _alone(only: Summary) -> str:
    if only.steps == 0:
        return f"{only.label} has not finished a step yet."
    if only.ranks == 1 or math.isnan(only.skew):
        where = "one rank" if only.ranks == 1 else f"{only.ranks} ranks"
        error = _percent(only.step_error)
        predicted = (
            f"; half of its steps took what was predicted to within {error}"
            if not math.isnan(only.step_error)
            else ""
        )
        rate = format_count(only.tokens_per_s)
        missing = f" {_missing(only)}" if only.missing_ranks else ""
        return f"{only.label} trains {rate} tokens a second on {where}{predicted}.{missing}"
    is_in_order = only.policy == IN_ORDER
    otherwise = "" if is_in_order else _predicted("; in order it would be {}", only.in_order_skew)
    return (
        f"Packed {'in order' if is_in_order else only.policy}, the fullest of {only.ranks} ranks "
        f"works {only.skew:.2f}× the mean{_predicted(', predicted {}', only.predicted_skew)}"
        f"{_by_turn(only)}{otherwise}."
    )


def _missing(only: Summary) -> str:
    ranks = ", ".join(map(str, only.missing_ranks[:4]))
    more = len(only.missing_ranks) - 4
    which = f"ranks {ranks}" if len(only.missing_ranks) > 1 else f"rank {ranks}"
    also = f" and {more:,} more" if more > 0 else ""
    return f"The journal of {which}{also} is missing, so how evenly they worked is not known."


def _predicted(clause: str, times: float) -> str:
    """The clause around a ratio; empty if the ratio is unknown."""
    return "" if math.isnan(times) else clause.format(f"{times:.2f}×")


def _by_turn(only: Summary) -> str:
    """The sum of the slowest rank of each turn, if it exceeds the fullest rank."""
    if not only.predicted_turn_skew >= only.predicted_skew + 0.005:
        return ""
    return _predicted(" and, added up turn by turn, {}", only.predicted_turn_skew)


def findings(records: Sequence[RunRecord], summaries: Sequence[Summary]) -> dict[str, str]:
    """One sentence for each figure, by the figure's name; left out if there is nothing to say."""
    worst = {
        one.label: highest(skew_of(measured_busy_s(record))[steady_steps(record)])
        for record, one in zip(records, summaries, strict=True)
    }
    one_total = len({one.tokens for one in summaries}) == 1

    def busy_error(one: Summary) -> float:
        return highest(np.array(one.busy_error))

    def loss(one: Summary) -> str:
        after = "" if one_total else f" (after {format_count(one.tokens)} tokens)"
        held_out = one.held_out_loss
        known = "" if math.isnan(held_out) else f", {held_out:.3f} on held-out documents"
        return f"{one.loss:.3f}{after}{known}"

    def clauses(
        value: Callable[[Summary], float], shown: Callable[[Summary], str], unit: str = ""
    ) -> str:
        """``3.1% of the peak with A, 2.9% with B``, of the runs that have the value."""
        known = [one for one in summaries if not math.isnan(value(one))]
        texts = [f"{shown(one)}{'' if index else unit}" for index, one in enumerate(known)]
        if len(summaries) > 1:
            texts = [f"{text} with {one.label}" for text, one in zip(texts, known, strict=True)]
        return ", ".join(texts)

    def loss_clauses() -> str:
        texts = {loss(one) for one in summaries if not math.isnan(one.loss)}
        is_one = len(summaries) > 1 and len(texts) == 1
        return f"{texts.pop()} with each" if is_one else clauses(lambda one: one.loss, loss)

    uneven = clauses(lambda one: one.uneven_share, lambda one: _percent(one.uneven_share))
    given_back = (
        f" Even work would give back {uneven}; the rest goes into meeting, and to other programs."
        if uneven and max(one.ranks for one in summaries) > 1
        else ""
    )
    only = summaries[0]
    by_turn = ""
    if len(summaries) == 1 and _by_turn(only):
        turns = _predicted("{}", only.predicted_turn_skew)
        by_turn = f"; the slowest ranks of all turns add up to {turns}, predicted"
    in_order = (
        _predicted("; packed in order it would be {}", only.in_order_skew)
        if len(summaries) == 1 and only.policy != IN_ORDER
        else ""
    )
    total = f"After {format_count(only.tokens)} tokens the loss" if one_total else "Loss"
    sentences = {
        "work": (
            "On an average step the fullest rank works {}" + by_turn + in_order + ".",
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
            "On half of all steps even the worst rank's compute was predicted to within {}.",
            clauses(busy_error, lambda one: _percent(busy_error(one))),
        ),
        "wait": (
            "Ranks wait {}." + given_back,
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
        "loss": (total + " is {}." + _spikes(summaries), loss_clauses()),
        "memory": (
            "The fullest rank peaks at {}.",
            clauses(lambda one: one.peak_memory_bytes, _memory_clause),
        ),
    }
    answer = {name: sentence.format(text) for name, (sentence, text) in sentences.items() if text}
    if experts := _experts_finding(records, summaries):
        answer["work"] = f"{answer.get('work', '')} {experts}".strip()
    if uneven := _worst_experts(records, summaries):
        answer["experts"] = uneven
    if encoders := _encoders_finding(records, summaries):
        answer["work"] = f"{answer.get('work', '')} {encoders}".strip()
    if lengths := _lengths_finding(records[0].start.corpus):
        answer["lengths"] = lengths
    if max(one.ranks for one in summaries) > 1:
        answer["timeline"] = "Hatching marks waiting: a rank has come to where it meets the others."
        if any(int(str(setting_of(record, "layout", "pp") or 1)) > 1 for record in records):
            answer["timeline"] += " Gaps inside a pipeline's step are its bubble."
    return answer


def _spikes(summaries: Sequence[Summary]) -> str:
    """Where losses spike; empty if none does."""
    parts = []
    for one in summaries:
        if one.loss_spikes:
            steps = ", ".join(f"{step:,}" for step in one.loss_spikes[:3])
            more = len(one.loss_spikes) - 3
            who = f" with {one.label}" if len(summaries) > 1 else ""
            steps += f" and {more:,} more" if more > 0 else ""
            parts.append(f"step{'s' * (len(one.loss_spikes) > 1)} {steps}{who}")
    return f" It spikes at {'; '.join(parts)}." if parts else ""


def _choice(record: RunRecord) -> str:
    """Which policies of experts a run chose, and what that cost."""
    choice = record.expert_choice
    if choice is None:
        return ""
    total = sum(choice.chosen.values())
    shares = sorted(choice.chosen.items(), key=lambda each: (-each[1], each[0]))
    text = ", ".join(f"{name} in {count / total:.0%}" for name, count in shares)
    if np.isnan(choice.regret):
        return f" ({text} of micro-batches; no single policy was tried yet)"
    than = "longer" if choice.regret >= 0 else "less"
    return (
        f" ({text} of micro-batches; steps took {abs(choice.regret):.0%} {than} than those of the "
        f"best single policy tried)"
    )


def _worst_experts(records: Sequence[RunRecord], summaries: Sequence[Summary]) -> str:
    """The step whose experts were the least even before balancing; or empty."""
    said = []
    for record, one in zip(records, summaries, strict=True):
        if record.expert_steps is None:
            continue
        _, before, after = record.expert_steps
        worst = int(before.argmax())
        who = f" with {one.label}" if len(summaries) > 1 else ""
        said.append(f"{after[worst]:.2f}×{who} where it would have had {before[worst]:.2f}×")
    if not said:
        return ""
    return f"On the least even step the fullest rank computes {'; '.join(said)}."


def _experts_finding(records: Sequence[RunRecord], summaries: Sequence[Summary]) -> str:
    """What balancing made of experts' loads, and parts and shortcuts of rows' travel; or empty."""
    parts, travel, cut, filed = [], [], [], []
    for record, one in zip(records, summaries, strict=True):
        if record.experts is not None:
            before, after = record.experts
            policy = setting_of(record, "experts", "policy")
            who = f" with {one.label}" if len(summaries) > 1 else ""
            parts.append(
                f"{after:.2f}× the mean under experts.policy {policy}{who}, "
                f"{before:.2f}× if each expert stayed on its own rank{_choice(record)}"
            )
        if record.parted:
            total = sum(record.parted.values())
            fused = total - record.parted.get(1, 0)
            shares = ", ".join(f"{n} in {ran / total:.0%}" for n, ran in record.parted.items())
            who = f" with {one.label}" if len(summaries) > 1 else ""
            cut.append(f"{fused:,} of {total:,} passes of rank 0{who} (parts: {shares})")
        if record.rows_travel_s is not None:
            beside_s, waited_s = record.rows_travel_s
            who = f" with {one.label}" if len(summaries) > 1 else ""
            travel.append(
                f"{format_seconds(beside_s)} of a step beside other work of rank 0{who}, which "
                f"then waits {format_seconds(waited_s)} for them"
            )
        if record.expert_file is not None:
            waited, read_bytes, sent_bytes = record.expert_file
            who = f" with {one.label}" if len(summaries) > 1 else ""
            filed.append(
                f"{waited:.1%} of a step{who}, reading {format_bytes(read_bytes)} and sending "
                f"{format_bytes(sent_bytes)} of them"
            )
    said = [f"The fullest rank computes experts' rows of {'; '.join(parts)}."] if parts else []
    said += [f"Rows travel in parts at {'; '.join(cut)}." if cut else ""]
    said += [f"Rows of experts travel {'; '.join(travel)}."] if travel else []
    said += [f"Rank 0 waits for experts in its file {'; '.join(filed)}."] if filed else []
    return " ".join(each for each in said if each)


def _encoders_finding(records: Sequence[RunRecord], summaries: Sequence[Summary]) -> str:
    """What dealing images and sound by work made of encoders' loads, rank by rank."""
    parts = []
    for record, one in zip(records, summaries, strict=True):
        encoders = record.encoders
        if encoders is None:
            continue
        who = f" with {one.label}" if len(summaries) > 1 else ""
        text = f"{encoders.skew:.2f}× the mean{who}, {encoders.skew_in_turn:.2f}× if dealt in turn"
        if len(encoders.work) <= _NAMED_RANKS:
            before, after = (
                ", ".join(f"{share:.0%}" for share in shares)
                for shares in (encoders.work_in_turn, encoders.work)
            )
            text += f" (shares of ranks: {before} in turn, {after} by work)"
        parts.append(text)
    return f"The fullest rank encodes {'; '.join(parts)}." if parts else ""


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
    text = _brief_bytes(one.peak_memory_bytes)
    if math.isnan(one.forecast_bytes):
        return text
    off = one.forecast_bytes / one.peak_memory_bytes - 1
    signed = f"{off:+.0%}".replace("-", "−")
    return f"{text} (forecast {_brief_bytes(one.forecast_bytes)}, {signed})"


def _brief_bytes(size_bytes: float) -> str:
    """Bytes without decimals from a hundred units on."""
    number, unit = format_bytes(size_bytes).split()
    return f"{float(number):.0f} {unit}" if float(number) >= 100 else f"{number} {unit}"


def _percent(share: float) -> str:
    if math.isnan(share):
        return "an unknown share"
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"
