"""Run models of ``transformers`` over several ranks by one call, with their own code unchanged.

Why
    ``transformers`` looks its attention function up in a registry, and passes it all arguments of
    the model's call. So a model that uses the registry can train on a share of the tokens without
    a change: its other layers look at one token at a time.

What it decides
    Whatever is not exact is refused: masks other than causal ones within documents and sliding
    windows, biases on scores, dropout of attention weights, caches, and layers other than
    attention that mix tokens.

Kept true (tests/oracle/hf/test_hf_context.py, tests/oracle/hf/test_hf_models.py)
    Loss, logits and all gradients equal those of the model's documents one by one; the whole
    text of each refusal.

Sources
    The registry: transformers 5.23, ``modeling_utils.py`` AttentionInterface,
    ``masking_utils.py`` AttentionMaskInterface.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from equipoise.base.errors import LayoutError, ModelError
from equipoise.nn.attention import Scoring
from equipoise.parallel.context.batch import REGISTERED, AttendedPack
from equipoise.parallel.context.transformers_models import require_exact
from equipoise.parallel.context.transformers_rope import show_pack_length
from equipoise.spec.mask import CAUSAL, Mask

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}

_MIXERS = (nn.Conv1d, nn.RNNBase)
"""Modules that read several tokens to compute one."""

_REFUSED = {
    "sinks": "has attention sinks of another form than s_aux",
    "position_bias": "adds a bias to its scores",
    "head_mask": "masks heads",
    "indices": "chooses its keys",
    "block_indices": "chooses its keys",
}
"""Arguments of attention functions in transformers 5.23 that change the result."""


@dataclass(frozen=True, slots=True)
class KeyLimit:
    """A causal mask that also hides keys further away than a window or chunk."""

    tokens: int


def use_context_parallelism(model: PreTrainedModel) -> None:
    """Let a decoder of ``transformers`` attend over the ranks that share a pack.

    From now on it trains on batches of ``shard_batch`` or ``ContextCollator`` alone. Without
    gradients it also runs whole documents of each rank's own, by the attention that it had before,
    as ``Trainer`` evaluates and ``generate`` decodes. Nothing else in the model changes, and
    ``model.set_attn_implementation("sdpa")`` undoes it.

    An architecture that is not in ``transformers_models.PROVEN`` is tried out with its own weights
    on documents of 16 tokens in all, twice forward and backward. Its gradients are untouched.

    Args:
        model: A causal language model that takes its attention from the registry, with its
            weights loaded and, if it must be tried out, not yet sharded.

    Raises:
        ModelError: it would not be exact: the model does not use the registry, has layers other
            than attention that mix tokens, has a loss for its experts' balance, or differs from
            one rank when tried out.
    """
    before = model.config._attn_implementation
    register_attention(model)
    try:
        require_exact(model)
    except ModelError:
        model.set_attn_implementation(before)
        raise
    if before != REGISTERED:
        _run_alone(model, before)


def _run_alone(model: PreTrainedModel, attention: str) -> None:
    """Let a model run without gradients and without a pack, by its own attention.

    A share of a pack has its labels in ``shift_labels``: without its pack it is refused.
    """

    def is_alone(given: dict[str, Any]) -> bool:
        has_share = given.get("context_pack") is not None or given.get("shift_labels") is not None
        return not (has_share or torch.is_grad_enabled())

    def begin(_model: nn.Module, _args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if is_alone(given) and model.config._attn_implementation == REGISTERED:
            model.set_attn_implementation(attention)
            alone.append(True)

    def end(*_: Any) -> None:
        if alone:
            alone.pop()
            model.set_attn_implementation(REGISTERED)

    alone: list[bool] = []
    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)


def register_attention(model: PreTrainedModel) -> None:
    """``use_context_parallelism`` for a model that has been tried out elsewhere.

    Raises:
        ModelError: likewise, except that nothing is tried out.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    others |= {type(each).__name__ for each in model.modules() if isinstance(each, _MIXERS)}
    if getattr(model, "_is_stateful", False) and not others:
        others = {"recurrent"}
    if others:
        raise ModelError(
            f"{name} mixes tokens in layers that see only the tokens of one rank: "
            f"{', '.join(sorted(others))}. Choose a model whose tokens meet in causal attention "
            f"alone."
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise ModelError(
            f"{name} scales queries by their place in the batch, not by their position. Set "
            f"config.attn_temperature_tuning = False before you build it."
        )
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"{name} adds a loss for its experts' balance, which is not a sum over tokens. Set "
            f"config.output_router_logits = False."
        )
    AttentionInterface.register(REGISTERED, attend_pack)
    AttentionMaskInterface.register(REGISTERED, limit_keys)
    before = model.config._attn_implementation
    model.set_attn_implementation(REGISTERED)
    if model.config._attn_implementation != REGISTERED:
        raise ModelError(
            f"{name} does not take its attention from the registry of transformers. Call "
            f"context_attention in its code, or choose a model that uses the registry."
        )
    try:
        show_pack_length(model, config)
    except ModelError:
        model.set_attn_implementation(before)
        raise


def attend_pack(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | KeyLimit | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    context_pack: AttendedPack | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over the ranks of a pack, with the signature of the ``transformers`` registry.

    Args:
        module: The attention layer.
        query: Queries of this rank's tokens [1, query heads, tokens, head width], RoPE applied.
        key: Keys of the same tokens [1, key/value heads, tokens, head width].
        value: Values of the same tokens and heads, of the same width or less.
        attention_mask: What ``limit_keys`` made.
        scaling: Factor of the scores; by default 1 / sqrt(head width).
        dropout: Must be 0.
        softcap: Limit of the scores, if they are capped.
        s_aux: Attention sinks [query heads], if the layer has them.
        context_pack: The pack that ``shard_batch`` returned.
        options: The layer's other arguments; refused if they change attention.

    Returns:
        Output [1, tokens, query heads, width of values], and no attention weights.

    Raises:
        LayoutError: the layer asks for something that is not computed here, or tensors and pack
            do not match.
    """
    layer = type(module).__name__
    if context_pack is None:
        raise LayoutError(
            f"{layer} was called without a pack. Give the model everything that shard_batch "
            f'returns, or choose another attention: model.set_attn_implementation("sdpa").'
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise LayoutError(
            f"{layer} has {query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} "
            f"keys, but a pack is one row of tokens with a query and a key each. Give the model "
            f"what shard_batch returns, and no cache."
        )
    _refuse(layer, getattr(module, "is_causal", True), dropout, options)
    mask = _mask(layer, attention_mask, options.get("sliding_window"), context_pack)
    context_pack.agree(module, query.device)
    q_tHE, k_tGE, v_tGE = (x[0].transpose(0, 1) for x in (query, key, value))
    width, value_width = q_tHE.shape[2], v_tGE.shape[2]
    if scaling is not None and scaling != 1 / math.sqrt(width):
        q_tHE = q_tHE * (scaling * math.sqrt(width))
    if value_width < width:  # latent attention; zeros come out as zeros
        v_tGE = pad(v_tGE, (0, width - value_width))
    o_tHE = context_pack.attend(q_tHE, k_tGE, v_tGE, Scoring(mask, softcap or 0.0, s_aux))
    return o_tHE[..., :value_width].unsqueeze(0), None


def _refuse(layer: str, is_causal: bool, dropout: float, options: dict[str, Any]) -> None:
    if dropout:
        raise LayoutError(
            f"{layer} drops attention weights with probability {dropout:g}, which attention over "
            f"ranks does not. Build the model with attention_dropout=0."
        )
    said = options.get("is_causal")
    if not (is_causal if said is None else said):
        raise LayoutError(
            f"{layer} is not causal, but attention over ranks is. Use it only for decoders."
        )
    for name, what in _REFUSED.items():
        if options.get(name) is not None:
            raise LayoutError(
                f"{layer} {what} ({name}), which attention over ranks does not support. Train this "
                f"model with another attention."
            )


def _mask(
    layer: str, mask: Tensor | KeyLimit | None, window: int | None, pack: AttendedPack
) -> Mask:
    if isinstance(mask, Tensor):
        raise LayoutError(
            f"{layer} was given a mask of shape {list(mask.shape)}, and attention over ranks takes "
            f"documents from the pack. Give the model what shard_batch returns, and no mask of "
            f"your own."
        )
    limits = [mask.tokens] if mask is not None else []
    limits += [window] if window is not None else []
    longest = max(pack.doc_tokens, default=0)
    if not limits or longest <= min(limits):
        return CAUSAL
    if limits == [window, window]:
        return Mask("window", window_tokens=min(limits))
    # For example chunks: transformers passes their length, but not that they are chunks.
    raise LayoutError(
        f"{layer} attends within {min(limits):,} tokens without a sliding window, but a document "
        f"has {longest:,}. Cut documents to {min(limits):,} tokens, or train this model with "
        f"another attention."
    )


def limit_keys(
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    q_length: int = 0,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_others: Any,
) -> KeyLimit | None:
    """The mask for the mask registry of ``transformers``: no mask tensor is ever built.

    Args:
        mask_function: Whether a query reads a key, as a function of batch, head and indices.
        attention_mask: Which tokens are not padding [1, tokens]; must be all.
        local_size: The window or chunk in which keys are read [tokens], if any.
        q_length: Tokens of this rank.
        use_vmap: Whether the model has changed ``mask_function``.
        device: Where the model is.

    Returns:
        None if the mask is causal; the window if it is causal within one.

    Raises:
        LayoutError: the mask is a different one, or tokens are masked.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise LayoutError(
            f"The attention mask leaves out {int((~attention_mask.bool()).sum()):,} of "
            f"{attention_mask.numel():,} tokens, but a pack has no padding. Give the model the "
            f"attention_mask that shard_batch returns."
        )
    if local_size is None and mask_function is causal_mask_function:
        return None
    if local_size is not None and not use_vmap:
        here = torch.arange(max(q_length - 1, 0), device=device)
        if not bool(torch.as_tensor(mask_function(0, 0, here, here + 1)).any()):
            return KeyLimit(int(local_size))
    raise LayoutError(
        "The model's mask is not the causal one, the only one that attention over ranks computes. "
        "Give the model everything that shard_batch returns, including its attention_mask, or "
        "train this model with another attention."
    )
