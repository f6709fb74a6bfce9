"""Read a run's journals into arrays, for the report and everything else that looks at a run.

Why
    A journal is events. Readers want columns instead: this step's loss, that rank's busy seconds.
    Only this module knows how ``observe.journal_lines`` become columns.

How lines become columns
    - A step that appears twice was trained twice (the run resumed): the later line wins.
      Spans have no such key, so the session that wrote them distinguishes them.
    - The order is that of lines, never of times: a clock may be set back during a run or between
      two of its sessions.
    - NaN marks what the journal lacks: a null, a rank that is behind, a newer writer's field.

Kept true (tests/unit/observe/test_reader.py)
    Any prefix of a journal's bytes reads as well as the whole; a newer schema is refused.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.errors import DataError
from equipoise.observe.event import journal_name
from equipoise.observe.experts import (
    expert_choice,
    expert_file,
    mean_skews,
    parted_passes,
    rows_travel_s,
    step_skews,
)
from equipoise.observe.journal_lines import MOST_RANKS, Event, JournalLines, read_journals
from equipoise.observe.modality import read_encoders
from equipoise.observe.run_record import (
    Evaluations,
    Memory,
    Recovery,
    RunAlarm,
    RunFault,
    RunRecord,
    Spans,
    Start,
    Stop,
)
from equipoise.spec.run.keys import RENAMED, rename_keys


def read_run(folder: Path | str) -> RunRecord:
    """Read every journal of a run folder.

    Returns:
        The run as arrays, without steps if none has finished.

    Raises:
        SpecError: no such folder.
        DataError: the folder does not hold a run, its run never started, a journal is not a file
            that can be read, or a newer equipoise wrote it.

    Cost: O(bytes); about 10 s for a million lines.
    """
    folder = Path(folder)
    return make_record(folder, read_journals(folder))


def make_record(folder: Path, journals: Mapping[int, JournalLines]) -> RunRecord:
    """A run as arrays, from the lines of its ranks' journals.

    Raises:
        DataError: rank 0's journal is missing, or the run never started.
    """
    if 0 not in journals:
        raise DataError(
            f"{folder} has no journal/{journal_name(0)}, which holds its steps. Copy the whole "
            f"journal folder from where the run was written."
        )
    zero = journals[0]
    if not zero.starts and zero.torn_lines:
        raise DataError(
            f"{folder} has a journal whose start event cannot be read: {zero.torn_lines:,} of its "
            "lines are damaged. Copy journal/rank-00000.jsonl again, or start the run again with "
            "`equipoise train`."
        )
    if not zero.starts:
        raise DataError(
            f"{folder} has a journal but no start event, so its run ended before its first "
            "step. Start it again with `equipoise train`, then report on it."
        )
    starts = [_start(event) for event in zero.starts]
    start = starts[-1]
    ranks = max(start.world, 1 + max(journals))
    step = np.array(sorted(zero.steps), dtype=np.int64)
    ordered = [zero.steps[number] for number in step.tolist()]
    packs = [zero.packs.get(number, {}) for number in step.tolist()]

    def of_step(key: str) -> Floats:
        return _column(ordered, key)

    def of_pack(key: str) -> Floats:
        return _column(packs, key)

    def of_ranks(key: str) -> Floats:
        table = np.full((step.size, ranks), np.nan)
        for rank, journal in journals.items():
            rows = [journal.steps.get(number, {}) for number in step.tolist()]
            table[:, rank] = _column(rows, key)
        return table

    def of_pack_ranks(key: str) -> Floats:
        table = np.full((step.size, ranks), np.nan)
        for row, pack in enumerate(packs):
            values = pack.get(key)
            if not isinstance(values, list):  # one number for all ranks
                table[row] = _number(values)
                continue
            for rank, value in enumerate(values[:ranks]):
                table[row, rank] = _number(value)
        return table

    def of_longest(key: str, of_each: Floats) -> Floats:
        longest = of_pack(key)  # older journals lack it; their runs have no pipeline
        return np.where(np.isnan(longest), of_each.max(axis=1), longest)

    predicted_s = of_pack_ranks("predicted_s")
    predicted_s = np.where(np.isnan(predicted_s), of_ranks("predicted_s"), predicted_s)
    in_order_s = of_pack_ranks("in_order_predicted_s")
    return RunRecord(
        folder=folder,
        start=start,
        resumed_steps=tuple(each.resumed_step for each in starts),
        ranks=ranks,
        step=step,
        t=of_step("t"),
        loss=of_step("loss"),
        grad_norm=of_step("grad_norm"),
        lr=of_step("lr"),
        tokens=of_step("tokens"),
        tokens_seen=of_step("tokens_seen"),
        step_s=of_step("step_s"),
        predicted_step_s=of_step("predicted_step_s"),
        tokens_per_s=of_step("tokens_per_s"),
        mfu=of_step("mfu"),
        busy_s=of_ranks("busy_s"),
        wait_s=of_ranks("wait_s"),
        run_delay_s=of_ranks("run_delay_s"),
        memory_bytes=of_ranks("memory_bytes"),
        peak_memory_bytes=of_ranks("peak_memory_bytes"),
        predicted_s=predicted_s,
        in_order_predicted_s=in_order_s,
        longest_s=of_longest("longest_s", predicted_s),
        in_order_longest_s=of_longest("in_order_longest_s", in_order_s),
        rank_tokens=of_pack_ranks("rank_tokens"),
        rank_documents=of_pack_ranks("rank_documents"),
        rank_flop=of_pack_ranks("rank_flop"),
        micro_batches=of_pack_ranks("micro_batches"),
        plan_s=of_pack("plan_s"),
        skew=of_pack("skew"),
        turn_skew=of_pack("turn_skew"),
        in_order_skew=of_pack("in_order_skew"),
        spans=tuple(_spans(journals.get(rank, JournalLines())) for rank in range(ranks)),
        memory=_memory(zero.memory),
        stop=_stop(zero.stop),
        faults=tuple(
            _fault(rank, event) for rank, journal in journals.items() for event in journal.faults
        ),
        recoveries=tuple(_recovery(event) for event in zero.recoveries),
        alarms=_alarms(journals),
        evaluations=_evaluations(zero.evaluations),
        experts=mean_skews(zero.experts),
        expert_steps=step_skews(zero.experts),
        expert_choice=expert_choice(zero.experts),
        encoders=read_encoders(zero.encoders),
        parted=parted_passes(zero.steps),
        rows_travel_s=rows_travel_s(zero.experts),
        expert_file=expert_file(zero.experts),
        torn_lines=sum(journal.torn_lines for journal in journals.values()),
        missing_ranks=tuple(rank for rank in range(start.world) if rank not in journals),
    )


def read_sides(folder: Path) -> list[RunRecord]:
    """A run, or every side of a run that compares policies, in the order in which it named them.

    Raises:
        SpecError, DataError: as ``read_run``.
    """
    inside = sorted(folder.glob(f"*/journal/{journal_name(0)}"))
    if (folder / "journal").is_dir() or not inside:
        return [read_run(folder)]
    sides = {path.parent.parent.name: read_run(path.parent.parent) for path in inside}
    for record in sides.values():
        names = record.start.compared.get("policies")
        if isinstance(names, list) and set(names) <= sides.keys():
            return [sides[name] for name in names]
    return [read_run(folder)]


def _number(value: object) -> float:
    """A number that is finite, else NaN."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value <= MOST_RANKS else default


def _column(events: Iterable[Mapping[str, Any]], key: str) -> Floats:
    return np.array([_number(event.get(key)) for event in events], dtype=np.float64)


def _start(event: Event) -> Start:
    """A start event; parts of it that are not of their kinds count as missing."""

    def table(key: str) -> dict[str, Any]:
        value = event.get(key)
        return value if isinstance(value, dict) else {}

    spec = {k: v for k, v in table("spec").items() if isinstance(v, dict) or k == "name"}
    stages, compared, corpus = table("stages"), table("compared"), table("corpus")
    if not _are_all(int, stages.get("edges"), stages.get("ranks")):
        stages = {}
    if not _are_all(str, compared.get("policies")):
        compared = {}
    if not _is_histogram(corpus.get("histogram")):
        corpus = corpus | {"histogram": None}

    return Start(
        t=_number(event.get("t")),
        version=str(event.get("version", "unknown")),
        world=_whole(event.get("world"), 1),
        resumed_step=_whole(event.get("resumed_step"), 0),
        spec=rename_keys(spec),
        origins={RENAMED.get(key, key): str(value) for key, value in table("origins").items()},
        model=table("model"),
        environment=table("environment"),
        corpus=corpus,
        curve=table("curve"),
        epoch=_whole(event.get("epoch"), 0),
        stages=stages,
        compared=compared,
    )


def _are_all(kind: type, *lists: object) -> bool:
    """Whether each is a list of values of this kind."""
    return all(isinstance(each, list) and all(type(v) is kind for v in each) for each in lists)


def _is_histogram(value: object) -> bool:
    """Whether a table has numbers of documents and of tokens between edges."""
    if not isinstance(value, dict):
        return False
    lists = [value.get(key) for key in ("edges", "documents", "tokens")]
    if not _are_all(int, *lists):
        return False
    edges, documents, tokens = (np.array(each) for each in lists)
    is_whole = edges.size - 1 == documents.size == tokens.size
    return is_whole and bool(documents.sum() > 0) and bool(tokens.sum() > 0)


def _spans(journal: JournalLines) -> Spans:
    """Columns of one rank's spans, without those that a later session repeated."""
    # By name as well: resuming at step 20 loads *at* step 20, but does not repeat it.
    last_session: dict[tuple[object, object], int] = {}
    for event, session in zip(journal.spans, journal.sessions, strict=True):
        last_session[event.get("name"), event.get("step")] = session
    ordered = []
    for event, session in zip(journal.spans, journal.sessions, strict=True):
        step = event.get("step")
        if step is None or last_session[event.get("name"), step] == session:
            ordered.append((session, step or 0, _number(event.get("t")), event))
    ordered.sort(key=lambda each: each[:3])
    kept = [event for *_, event in ordered]
    names: dict[str, int] = {}
    name = [names.setdefault(str(event.get("name")), len(names)) for event in kept]
    return Spans(
        names=tuple(names),
        name=np.array(name, dtype=np.int64),
        t=_column(kept, "t"),
        duration_s=_column(kept, "duration_s"),
        step=_column(kept, "step"),
        micro_batch=_column(kept, "micro_batch"),
        stage=_column(kept, "stage"),
        predicted_begin_s=_column(kept, "predicted_begin_s"),
        predicted_s=_column(kept, "predicted_s"),
    )


def _evaluations(events: Mapping[int, Event]) -> Evaluations:
    ordered = [events[step] for step in sorted(events)]
    tables = [each if isinstance(each := event.get("buckets"), dict) else {} for event in ordered]

    def lists(table: Mapping[str, Any], key: str) -> list[Any]:
        values = table.get(key)
        return values if isinstance(values, list) else []

    names = sorted({n for t in tables for n in lists(t, "least_tokens") if isinstance(n, int)})

    def of_buckets(key: str) -> Floats:
        rows = np.full((len(ordered), len(names)), np.nan)
        for row, table in enumerate(tables):
            for name, value in zip(lists(table, "least_tokens"), lists(table, key), strict=False):
                if name in names:
                    rows[row, names.index(name)] = _number(value)
        return rows

    def of_each(key: str) -> Floats:
        return _column(ordered, key)

    return Evaluations(
        step=np.array(sorted(events), dtype=np.int64),
        loss=of_each("loss"),
        bits_per_byte=of_each("bits_per_byte"),
        labels=of_each("labels"),
        tokens=of_each("tokens"),
        documents=of_each("documents"),
        eval_s=of_each("eval_s"),
        predicted_s=of_each("predicted_s"),
        least_tokens=np.array(names, dtype=np.int64),
        bucket_loss=of_buckets("loss"),
        bucket_labels=of_buckets("labels"),
        bucket_documents=of_buckets("documents"),
    )


def _memory(event: Event | None) -> Memory | None:
    if event is None:
        return None
    terms = event.get("terms")
    terms = terms if isinstance(terms, dict) else {}
    return Memory(
        forecast_bytes=_number(event.get("forecast_bytes")),
        terms={str(key): _number(value) for key, value in terms.items()},
    )


def _stop(event: Event | None) -> Stop | None:
    """The last session's stop; resuming undid those of earlier sessions."""
    if event is None:
        return None
    return Stop(
        t=_number(event.get("t")),
        reason=str(event.get("reason", "unknown")),
        step=_number(event.get("step")),
    )


def _fault(rank: int, event: Event) -> RunFault:
    return RunFault(
        t=_number(event.get("t")),
        rank=rank,
        name=str(event.get("name")),
        message=str(event.get("message", "")),
        step=_number(event.get("step")),
        type=str(event.get("type", "")),
    )


def _alarms(journals: Mapping[int, JournalLines]) -> tuple[RunAlarm, ...]:
    alarms = [
        RunAlarm(_number(each.get("t")), rank, str(each.get("name")), str(each.get("message", "")))
        for rank, journal in journals.items()
        for each in journal.alarms
    ]
    return tuple(sorted(alarms, key=lambda each: each.t))


def _recovery(event: Event) -> Recovery:
    rank = event.get("fault_rank")
    return Recovery(
        t=_number(event.get("t")),
        action=str(event.get("action", "unknown")),
        fault=str(event.get("fault", "unknown")),
        rank=rank if isinstance(rank, int) else None,
        number=_number(event.get("number")),
        step=_number(event.get("step")),
        message=str(event.get("message", "")),
    )
