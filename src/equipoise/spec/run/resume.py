"""What happens when a run resumes from a checkpoint with another value of a key.

What it decides
    Every key of run.toml is one of four kinds, *reported* unless declared otherwise:

    - *free*: no step holds other tokens and no number changes, up to rounding. Any layout
      equals one rank, so layouts are free.
    - *reported*: later steps hold other tokens, or train differently. That is allowed, and
      reported with both values; the manifest holds those of the run that saved the checkpoint.
    - *compared*: what the key stands for is compared, and refused if it differs: the sizes of
      the model, the digest of the corpus.
    - *refused*: documents would come twice or never.

Kept true (tests/unit/spec/run/test_resume.py)
    Only keys that exist are declared; a key that changes what a step holds is never free.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from equipoise.spec.run.keys import keys, toml
from equipoise.spec.run.spec import RunSpec


class OnResume(Enum):
    """What another value does to a run that resumes."""

    FREE = "free"
    REPORTED = "reported"
    COMPARED = "compared"
    REFUSED = "refused"


_FREE = """
    name data.cache eval.every_steps train.recompute
    layout.dp layout.cp layout.tp layout.pp layout.virtual layout.ep
    layout.etp layout.strategy layout.sharding layout.ranks_per_node layout.zero
    layout.replicas layout.parts layout.pin layout.deadline_s
    experts.policy experts.slots experts.least_rows experts.routes experts.memory_mib
    checkpoint.every_steps checkpoint.keep checkpoint.rank_mtbf_hours
    checkpoint.second_path
    fault.on fault.restarts fault.within_s fault.least_dp
    fault.fingerprint_steps fault.spares fault.wait_s
    journal.tensorboard journal.wandb journal.mlflow
"""
"""Without ``layout.schedule``: some schedules leave out stages and so train another model."""

_COMPARED = """
    data.source data.path data.field data.format data.loss data.mix data.tokenizer data.vocab
    model.engine model.preset model.layers model.hidden model.heads model.kv_heads model.ffn
    model.vocab model.head_width model.tied model.rope_theta model.experts model.top_k
    model.expert_ffn model.shared_ffn model.shared_gate model.dense_layers model.expert_every
    model.norm_top_k model.balance model.balance_rate model.capacity_factor
    model.identity_experts model.real_top_k model.shortcut
    lora.rank lora.alpha lora.targets
    vision.layers vision.hidden vision.heads vision.patch vision.least_tokens vision.most_tokens
    audio.layers audio.hidden audio.heads
"""
"""Without ``model.init``: the checkpoint's weights are used, whatever it says."""

TRAINED = (
    *("lora.rank", "lora.alpha", "lora.targets"),
    *("vision.layers", "vision.hidden", "vision.heads", "vision.patch"),
    *("audio.layers", "audio.hidden", "audio.heads"),
)
"""Keys that say which weights there are to train, beside the model's sizes. Without
``train.freeze``: what is trained after being frozen begins without moments."""

_KINDS = {
    **dict.fromkeys(_FREE.split(), OnResume.FREE),
    **dict.fromkeys(_COMPARED.split(), OnResume.COMPARED),
    "train.seed": OnResume.REFUSED,
}


def on_resume() -> dict[str, OnResume]:
    """The kind of every key of run.toml.

    >>> on_resume()["pack.context_tokens"].value, on_resume()["layout.zero"].value
    ('reported', 'free')
    """
    return {name: _KINDS.get(name, OnResume.REPORTED) for name in keys()}


def resume_facts(spec: RunSpec) -> dict[str, Any]:
    """The values of keys that a checkpoint holds to be compared on resume, by dotted name."""
    kinds = on_resume()
    values = {
        name: getattr(getattr(spec, key.section), key.field)
        for name, key in keys().items()
        if kinds[name] is OnResume.REPORTED or name in TRAINED
    }
    return {name: [*each] if isinstance(each, tuple) else each for name, each in values.items()}


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Changed keys with both values; empty if none changed.

    Keys that only one side knows, from another version, are left out.

    >>> describe_changes({"train.lr": 0.1, "pack.queues": 2}, {"train.lr": 0.2, "pack.queues": 2})
    'train.lr = 0.1 before and 0.2 now'
    """

    def words(value: Any) -> str:
        return "unset" if value is None else toml(value)

    return "; ".join(
        f"{name} = {words(before[name])} before and {words(value)} now"
        for name, value in now.items()
        if name in before and before[name] != value
    )
