"""Every event that this version journals, and the fields of each, by the kind of their values.

Why
    Whoever asks a journal for an event that nobody writes gets silence, which looks like health.
    So questions are checked against this list before they are asked.

Kept true (tests/unit/observe/test_catalog.py)
    Every event that the source writes by name is here, and here are only events and fields that
    docs/start/run-folder.md describes; the journals of a real run hold nothing else.
"""

from dataclasses import dataclass, field
from typing import Literal

from equipoise.observe.event import Kind

FieldKind = Literal["number", "text", "flag", "list", "object"]

COMMON: dict[str, FieldKind] = {"t": "number", "rank": "number", "name": "text"}
"""Fields of every event that a question may name."""


@dataclass(frozen=True, slots=True)
class EventKind:
    """One event: its kind, its name, and what its fields hold beside ``COMMON``."""

    kind: Kind
    name: str
    fields: dict[str, FieldKind] = field(default_factory=dict)
    is_per_step: bool = False
    """Whether a step has one on each rank (a span: one for each micro-batch), so that of a step
    that was computed twice the later line counts."""


def _fields(numbers: str = "", **kinds: str) -> dict[str, FieldKind]:
    """Fields by the kind of their values, each a text of names."""
    names: dict[str, FieldKind] = dict.fromkeys(numbers.split(), "number")
    names |= dict.fromkeys(kinds.get("texts", "").split(), "text")
    names |= dict.fromkeys(kinds.get("flags", "").split(), "flag")
    names |= dict.fromkeys(kinds.get("lists", "").split(), "list")
    return names | dict.fromkeys(kinds.get("objects", "").split(), "object")


def _span(name: str, numbers: str = "", flags: str = "") -> EventKind:
    more = _fields(f"duration_s step {numbers}", flags=flags)
    return EventKind("span", name, more, is_per_step=True)


_IN_PIPELINE = "micro_batch stage predicted_begin_s predicted_s"
_WAIT = {
    "numbers": "waiting_rank waited_s",
    "texts": "message what phase",
    "lists": "missing culprits",
    "objects": "stacks calls",
}
_SLOW = {
    "numbers": "step slow_rank excess extra_s host_share since neighbour_share",
    "texts": "part cause whose resource message",
}
_LINK = "source target rate expected resent"
_END = "type message traceback"

EVENTS: tuple[EventKind, ...] = (
    *map(_span, ("measure", "prove", "load", "wait", "reduce", "evaluate", "save")),
    *map(_span, ("encode", "encode-backward")),
    _span("optimizer", flags="is_shared"),
    EventKind("span", "garbage", _fields("duration_s step generation")),
    *(
        _span(name, _IN_PIPELINE)
        for name in ("forward", "backward", "backward-input", "backward-weight")
    ),
    EventKind(
        "scalar",
        "step",
        _fields(
            "step loss grad_norm lr tokens labels tokens_seen step_s tokens_per_s mfu busy_s "
            "wait_s run_delay_s memory_bytes peak_memory_bytes predicted_s predicted_step_s",
            objects="own parted",
        ),
        is_per_step=True,
    ),
    EventKind(
        "scalar",
        "experts",
        _fields(
            "step balance_loss regret rows_beside_s rows_waited_s",
            texts="tried",
            lists="loads expert_skew rank_skew owner_skew planned_skew copies copied_bytes "
            "real_experts",
            objects="chosen priced file",
        ),
        is_per_step=True,
    ),
    EventKind(
        "scalar",
        "encoders",
        _fields(
            "step items patches rows gap bridge_bytes bridge_messages weight_bytes weight_messages",
            lists="work work_in_turn encode_s encode_core_s bridge_s",
        ),
        is_per_step=True,
    ),
    EventKind(
        "scalar",
        "saved",
        _fields("step size_bytes blocked_s staged_s written_s core_s"),
        is_per_step=True,
    ),
    EventKind(
        "scalar",
        "recommend",
        _fields(
            "step loss samples step_s ids exchanges lookup_s exchange_s dense_s reduce_s "
            "input_s input_waited_s ids_s ids_waited_s",
            objects="sent_bytes",
        ),
        is_per_step=True,
    ),
    EventKind(
        "scalar",
        "ranking",
        _fields("epoch step auc entropy test_auc test_entropy", flags="is_best"),
    ),
    EventKind("scalar", "tables", _fields("steps ids", lists="sent_bytes")),
    EventKind("scalar", "loaded", _fields("step needed_bytes read_bytes ranges")),
    EventKind(
        "scalar", "agreement", _fields("step loss grad_norm", texts="beside"), is_per_step=True
    ),
    EventKind(
        "scalar",
        "eval",
        _fields(
            "step loss perplexity bits_per_byte text_bytes documents tokens labels eval_s "
            "predicted_s",
            texts="corpus",
            lists="rank_busy_s",
            objects="buckets",
        ),
        is_per_step=True,
    ),
    EventKind(
        "instant",
        "start",
        _fields(
            "world resumed_step epoch",
            texts="version",
            objects="spec origins model environment corpus stages curve compared",
        ),
    ),
    EventKind(
        "instant",
        "proof",
        _fields(
            "devices loss_error forward_error gradient_error tolerance sent_bytes scheduled_bytes",
            texts="case torch worst_parameter",
            flags="is_exact",
        ),
    ),
    EventKind("instant", "unproven", _fields("devices", texts="message")),
    EventKind("instant", "late", _fields(**_WAIT)),
    EventKind("instant", "came", _fields(**_WAIT)),
    EventKind("instant", "slow", _fields(**_SLOW)),
    EventKind("instant", "slow-why", _fields(**_SLOW)),
    EventKind("instant", "even", _fields(**_SLOW)),
    EventKind("instant", "stopped", _fields("stopped_s", texts="message", lists="processes")),
    EventKind("instant", "continued", _fields("stopped_s", texts="message", lists="processes")),
    EventKind("instant", "slow-link", _fields(_LINK, texts="message")),
    EventKind("instant", "even-link", _fields(_LINK, texts="message")),
    EventKind("instant", "changed", _fields("step", texts="message")),
    EventKind("instant", "stop", _fields("step", texts="reason")),
    EventKind(
        "decision",
        "pack",
        _fields(
            "step plan_s predicted_step_s skew turn_skew in_order_skew longest_s "
            "in_order_longest_s",
            texts="policy digest",
            lists="micro_batches rank_tokens rank_documents rank_flop predicted_s "
            "in_order_predicted_s",
        ),
        is_per_step=True,
    ),
    EventKind("decision", "doubt", _fields("step", texts="message")),
    EventKind("decision", "interval", _fields("step every_steps cost_s written_s step_s mtbf_s")),
    EventKind("decision", "overhead", _fields("overhead_s")),
    EventKind(
        "decision",
        "memory",
        _fields(
            "forecast_bytes tokens micro_batches sizes most_tokens measured_bytes", objects="terms"
        ),
    ),
    EventKind(
        "decision",
        "recovery",
        _fields("fault_rank step number dp", texts="action fault message spares"),
    ),
    EventKind("decision", "eval-overlap", _fields("step documents", texts="message")),
    EventKind("fault", "nan-loss", _fields("step", texts="what message", lists="documents")),
    EventKind(
        "fault",
        "corrupt",
        _fields("step verified_step", texts="message", lists="ranks tensors", flags="is_certain"),
    ),
    EventKind("fault", "torn-checkpoint", _fields(texts="message")),
    EventKind("fault", "save", _fields("step", texts="message")),
    EventKind("fault", "second", _fields(texts="message")),
    EventKind("fault", "disk", _fields("step", texts="message")),
    EventKind("fault", "folder", _fields("step", texts="message")),
    EventKind("fault", "journal", _fields("lost_lines", texts="message")),
    EventKind(
        "fault",
        "error",
        _fields(
            f"exit_code {_WAIT['numbers']}",
            texts=f"{_END} what phase",
            lists=_WAIT["lists"],
            objects=_WAIT["objects"],
        ),
    ),
    EventKind("fault", "exception", _fields("exit_code", texts=_END)),
    EventKind("fault", "killed", _fields("step", texts="message")),
)


def find_events(kind: str, name: str) -> tuple[EventKind, ...]:
    """The events of a kind and a name; ``*`` as a name is every event of the kind.

    >>> [each.name for each in find_events("instant", "late")]
    ['late']
    >>> len(find_events("fault", "*")) > 5
    True
    """
    return tuple(each for each in EVENTS if each.kind == kind and name in (each.name, "*"))
