"""The Hugging Face names of our weights, and how theirs are made of ours.

What it decides
    Each of their weights is one of ours, or several of ours one below the other (phi3 keeps
    queries, keys and values in one matrix), or one expert of a stack of ours [X, out, in].

    Some model types turn neighbouring rotary pairs; the rows of their queries and keys are
    reordered. For one head of width 6::

        half-split, here   a0 a1 a2 b0 b1 b2      pair i is (row i, row i + 3)
        neighbours         a0 b0 a1 b1 a2 b2      pair i is (row 2 i, row 2 i + 1)

Kept true (tests/oracle/test_transformers.py, tests/oracle/test_round_trip.py)
    ``transformers`` reads what is written under these names, and what it writes is read here;
    there and back every weight has the same bits.

Sources
    transformers 5.23, ``models/*/modeling_*.py`` for the names; for experts
    ``conversion_mapping.py``, since files keep names that its modules no longer use.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_OUTER = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
_INNER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_QWEN_EXPERTS = {
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts.gate": "mlp.experts.{}.gate_proj",
    "feed_forward.experts.up": "mlp.experts.{}.up_proj",
    "feed_forward.experts.down": "mlp.experts.{}.down_proj",
}
_OTHER = {
    "mixtral": {
        "feed_forward.router": "block_sparse_moe.gate",
        "feed_forward.experts.gate": "block_sparse_moe.experts.{}.w1",
        "feed_forward.experts.up": "block_sparse_moe.experts.{}.w3",
        "feed_forward.experts.down": "block_sparse_moe.experts.{}.w2",
    },
    "phi3": {
        "attention.query": "self_attn.qkv_proj",
        "attention.key": "self_attn.qkv_proj",
        "attention.value": "self_attn.qkv_proj",
        "feed_forward.gate": "mlp.gate_up_proj",
        "feed_forward.up": "mlp.gate_up_proj",
    },
    "qwen2_moe": _QWEN_EXPERTS
    | {
        "feed_forward.shared.gate": "mlp.shared_expert.gate_proj",
        "feed_forward.shared.up": "mlp.shared_expert.up_proj",
        "feed_forward.shared.down": "mlp.shared_expert.down_proj",
        "feed_forward.shared.switch": "mlp.shared_expert_gate",
    },
    "qwen3_moe": _QWEN_EXPERTS,
}
"""Names within a layer, by model type, where they are not ``_INNER``'s."""

_TURNS_NEIGHBOURS = frozenset(("ernie4_5", "helium"))
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_TURNED = re.compile(r".+\.attention\.(query|key)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Part:
    """One of our weights, or one expert of it, within one of theirs."""

    name: str
    """Ours."""
    expert: int | None
    rows: int
    """Rows that it has in theirs."""
    turn_width: int
    """Width of the heads whose rows are reordered; 0 if they are not."""

    def theirs(self, whole: Tensor) -> Tensor:
        """Our weight as it stands in theirs."""
        part = whole if self.expert is None else whole[self.expert]
        return neighbours(part, self.turn_width) if self.turn_width else part

    def ours(self, part: Tensor) -> Tensor:
        """The inverse of ``theirs``, for one expert."""
        return half_split(part, self.turn_width) if self.turn_width else part


@dataclass(frozen=True, slots=True)
class TheirWeight:
    """One of their weights: its shape, and ours that it is made of, one below the other."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def half_split(rows: Tensor, width: int) -> Tensor:
    """Rows of heads ``width`` wide from neighbouring pairs to half-split ones: [rows, ...].

    >>> half_split(torch.tensor([0, 3, 1, 4, 2, 5]), 6).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    pairs: Tensor = rows.unflatten(0, (-1, width // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def neighbours(rows: Tensor, width: int) -> Tensor:
    """The inverse of ``half_split``."""
    halves: Tensor = rows.unflatten(0, (-1, 2, width // 2))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def hf_names(name: str, *, model_type: str = "llama", experts: int = 0) -> list[str]:
    """The Hugging Face names of one of our weights: one, or one for each expert in order.

    Args:
        name: Our name.
        model_type: As in config.json.
        experts: Number of experts, X.

    >>> hf_names("layers.3.attention.query.weight")
    ['model.layers.3.self_attn.q_proj.weight']
    >>> hf_names("layers.0.feed_forward.experts.up.weight", model_type="mixtral", experts=2)[1]
    'model.layers.0.block_sparse_moe.experts.1.w3.weight'
    """
    stem, _, kind = name.rpartition(".")
    if (layer := _LAYER.fullmatch(stem)) is None:
        return [f"{_OUTER[stem]}.{kind}"]
    theirs = (_INNER | _OTHER.get(model_type, {}))[layer[2]]
    whole = f"model.layers.{layer[1]}.{theirs}.{kind}"
    return [whole.format(each) for each in range(experts)] if "{}" in whole else [whole]


def their_weights(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    *,
    model_type: str,
    experts: int,
    head_width: int,
) -> dict[str, TheirWeight]:
    """Every weight of a Hugging Face model, by its name.

    Args:
        shapes: Name and shape of every weight of ours, in the decoder's order.
        model_type: As in config.json.
        experts: Number of experts, X.
        head_width: Width of one head.

    >>> shapes = [("layers.0.feed_forward.gate.weight", (8, 4))]
    >>> shapes += [("layers.0.feed_forward.up.weight", (8, 4))]
    >>> theirs = their_weights(shapes, model_type="phi3", experts=0, head_width=2)
    >>> {name: weight.shape for name, weight in theirs.items()}
    {'model.layers.0.mlp.gate_up_proj.weight': (16, 4)}
    """
    parts: dict[str, list[Part]] = {}
    columns: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes:
        is_turned = model_type in _TURNS_NEIGHBOURS and _TURNED.fullmatch(name)
        turn_width = head_width if is_turned else 0
        theirs = hf_names(name, model_type=model_type, experts=experts)
        is_stack = ".experts." in name
        rows, *rest = shape[1:] if is_stack else shape
        for at, each in enumerate(theirs):
            part = Part(name, at if is_stack else None, rows, turn_width)
            parts.setdefault(each, []).append(part)
            columns[each] = tuple(rest)
    return {
        name: TheirWeight((sum(part.rows for part in held), *columns[name]), tuple(held))
        for name, held in parts.items()
    }


def join_theirs(weight: TheirWeight, state: dict[str, Tensor]) -> Tensor:
    """One of their weights, made of ours; a view where it is one of ours."""
    parts = [part.theirs(state[part.name]) for part in weight.parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_theirs(weights: dict[str, TheirWeight], held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights out of theirs, which are taken out of ``held`` one by one."""
    pieces: dict[str, list[Tensor]] = {}
    stacks = set[str]()
    for name, weight in weights.items():
        rows = held.pop(name).split([part.rows for part in weight.parts])
        for part, piece in zip(weight.parts, rows, strict=True):
            pieces.setdefault(part.name, []).append(part.ours(piece))
            if part.expert is not None:
                stacks.add(part.name)
    return {
        name: torch.stack(pieces.pop(name)) if name in stacks else pieces[name][0]
        for name in list(pieces)
    }
