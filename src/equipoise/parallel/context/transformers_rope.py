"""Show the pack's length to rotary embeddings whose frequencies depend on the longest sequence.

Why
    ``longrope`` and dynamic NTK choose frequencies by the largest position that they see. A rank
    with the first half of a long document would choose those of a short one.

What it decides
    A rotary embedding computes one extra position, the pack's last, which is dropped from its
    result. So ``transformers`` treats the largest position, including caches of earlier calls,
    just as one process would for the same packed row: all documents of a pack use the frequencies
    of its longest.

Kept true (tests/oracle/hf/test_hf_rope.py)
    Logits and gradients equal those of the packed row in one process, over steps whose packs
    grow and shrink again.

Sources
    transformers 5.23, ``modeling_rope_utils.py`` dynamic_rope_update.
"""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.base.errors import LayoutError, ModelError
from equipoise.parallel.context.batch import REGISTERED

_REACH = "_pack_reach_tokens"
"""Attribute of a rotary embedding: one more than the last position of the current pack."""


def is_length_dependent(rope_type: Any) -> bool:
    """Whether frequencies of this type depend on the longest sequence."""
    types = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(isinstance(x, str) and ("dynamic" in x or x == "longrope") for x in types)


def length_dependent_types(config: Any) -> list[str]:
    """RoPE types in a configuration and its layers' that depend on the longest sequence."""
    given = getattr(config, "rope_parameters", None) or {}
    options = [given, *(x for x in given.values() if isinstance(x, dict))]
    return sorted({x["rope_type"] for x in options if is_length_dependent(x.get("rope_type"))})


def switch_lengths(config: Any) -> list[int]:
    """Lengths at which rotary embeddings of a configuration may change [tokens]."""
    given = getattr(config, "rope_parameters", None) or {}
    if not given:
        return []
    sources = [given, *(x for x in given.values() if isinstance(x, dict))]
    original = "original_max_position_embeddings"
    lengths = {x.get(original) for x in sources}
    lengths |= {getattr(config, name, None) for name in (original, "max_position_embeddings")}
    return sorted(int(x) for x in lengths if isinstance(x, int | float) and x > 0)


def show_pack_length(model: nn.Module, config: Any) -> None:
    """Let rotary embeddings follow the longest document of the pack, whichever rank holds it.

    Raises:
        ModelError: the configuration asks for frequencies by length, but no module declares that
            it computes them.
    """
    rotaries = [x for x in model.modules() if is_length_dependent(getattr(x, "rope_type", None))]
    types = length_dependent_types(config)
    if types and not rotaries:
        raise ModelError(
            f"{type(model).__name__} has RoPE of rope_type {', '.join(types)}, whose frequencies "
            f"go by the longest sequence, and none of its modules has that rope_type. Choose "
            f"another rope_type, or train it without context parallelism."
        )
    if not rotaries or hasattr(rotaries[0], _REACH):
        return
    for rotary in rotaries:
        setattr(rotary, _REACH, None)
        rotary.register_forward_pre_hook(_add_last_position, with_kwargs=True)
        rotary.register_forward_hook(_drop_last_position)
    # Every module that contains one: a wrapper may call inner modules, bypassing the model.
    for module in model.modules():
        if any(hasattr(x, _REACH) for x in module.modules() if x is not module):
            module.register_forward_pre_hook(_note_reach, with_kwargs=True)


def _note_reach(module: nn.Module, _args: Any, options: dict[str, Any]) -> None:
    pack = options.get("context_pack")
    if pack is not None:
        for each in module.modules():
            if hasattr(each, _REACH):
                setattr(each, _REACH, pack.reach_tokens)


def _is_over_ranks(rotary: nn.Module) -> bool:
    return bool(getattr(rotary.config, "_attn_implementation", None) == REGISTERED)


def _add_last_position(
    rotary: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not _is_over_ranks(rotary):
        return None
    reach = getattr(rotary, _REACH)
    if reach is None:
        raise LayoutError(
            f"{type(rotary).__name__} was called without a pack, but its frequencies depend on the "
            f"longest document. Give the model everything shard_batch returns, or choose another "
            f'attention: model.set_attn_implementation("sdpa").'
        )
    given = options["position_ids"] if "position_ids" in options else args[1]
    longer = torch.cat([given, torch.full_like(given[..., :1], max(reach - 1, 0))], -1)
    if "position_ids" in options:
        return args, {**options, "position_ids": longer}
    return (args[0], longer, *args[2:]), options


def _drop_last_position(rotary: nn.Module, _args: Any, out: Any) -> Any:
    if not _is_over_ranks(rotary):
        return out
    if isinstance(out, Tensor):
        return out[..., :-1, :]
    return type(out)(x[..., :-1, :] for x in out)
