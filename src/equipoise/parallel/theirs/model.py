"""A causal language model of transformers, called as our own decoder is.

Why
    Packing, ZeRO, context parallelism, checks and checkpoints need one call: packed tokens in, a
    summed loss out. Between embedding and last norm a model of transformers runs unchanged here;
    its attention is the registered one, which takes documents and ranks from the pack.

What it decides
    The loss is ``head_loss`` of the last hidden states where ``head.read_head`` has shown that the
    model's logits are a plain, scaled or capped product with its head, so no logits are kept.
    Elsewhere it is the cross-entropy of the model's own logits.

    transformers cannot run on no token. A rank without any runs one spare token, which attends to
    nothing, is read by nobody and has no label, so that it joins every exchange and adds nothing.

Kept true (tests/multi/train/test_engine.py, tests/oracle/test_engine_models.py)
    Loss and every gradient of any layout equal those of transformers' own eager model, run document
    by document.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from equipoise.balance.context.plan import plan_context
from equipoise.base.errors import ModelError
from equipoise.nn.attention import PackAttention, Scoring, attend_documents, pack_attention
from equipoise.nn.loss import IGNORED, head_loss
from equipoise.nn.packed import PackedModel
from equipoise.parallel.context.attention import attend_in_one_process
from equipoise.parallel.theirs.head import Head
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import layer_recompute
from equipoise.spec.run.spec import Recompute


class TransformersModel(PackedModel):
    """A model of transformers whose attention comes from the registry."""

    def __init__(self, theirs: PreTrainedModel, model: ModelSpec, head: Head | None) -> None:
        """Wrap a model; its weights keep their names, behind ``theirs``.

        Args:
            theirs: As ``build.build_theirs`` returns it.
            model: Its sizes, for prices.
            head: What its logits are; None for its own forward pass.

        Raises:
            ModelError: its decoder layers cannot be told apart from the rest.
        """
        super().__init__()
        self.theirs, self.model, self.head = theirs, model, head
        self.norm = nn.Identity()
        self._stack = find_layers(theirs)

    @property
    def _output(self) -> nn.Linear:
        output: nn.Linear = self.theirs.get_output_embeddings()  # type: ignore[no-untyped-call]
        return output

    @property
    def stack(self) -> Sequence[nn.Module]:
        """Its decoder layers, in order."""
        return self._stack

    def forward(
        self,
        tokens_T: Tensor,
        pack: Sequence[int] | PackAttention,
        *,
        labels_T: Tensor | None = None,
    ) -> Tensor:
        """Summed cross-entropy, or logits: see ``PackedModel``."""
        given = pack if isinstance(pack, PackAttention) else _alone(pack, tokens_T.device)
        positions_T, is_spare = given.positions_T, not len(tokens_T)
        ids_T = tokens_T
        if is_spare:
            ids_T, positions_T = (x.new_zeros(1) for x in (tokens_T, positions_T))
        options: dict[str, Any] = {
            "input_ids": ids_T.unsqueeze(0),
            "position_ids": positions_T.unsqueeze(0),
            "attention_mask": torch.ones_like(ids_T).unsqueeze(0),
            "use_cache": False,
            "context_pack": _Pack(given, is_spare=is_spare),
        }
        if self.head is None:
            states_tD = self.theirs(**options).logits[0]
        else:
            states_tD = self.theirs.base_model(**options).last_hidden_state[0]
        states_tD = self.norm(states_tD[: len(tokens_T)])
        if labels_T is None:
            return self.logits(states_tD)
        if self.head is None:
            wide = torch.promote_types(states_tD.dtype, torch.float32)
            return cross_entropy(
                states_tD.to(wide), labels_T, ignore_index=IGNORED, reduction="sum"
            )
        head, weight = self.head, self._output.weight
        return head_loss(states_tD, weight, labels_T, scale=head.scale, softcap=head.softcap)

    def logits(self, x_tD: Tensor) -> Tensor:
        """Logits [t, V] of the last hidden states, or the model's own, which ``norm`` has seen."""
        if self.head is None:
            return x_tD
        return self.head.bend(x_tD @ self._output.weight.t())

    def set_recompute(self, setting: Recompute) -> None:
        """Set which layers run again in the backward.

        Raises:
            ModelError: the model's layers have no gradient checkpointing.
        """
        again = [layer_recompute(setting, at) == "full" for at in range(len(self._stack))]
        if not any(again):
            return
        name = type(self.theirs).__name__
        if not self.theirs.supports_gradient_checkpointing:
            raise ModelError(
                f"The layers of {name} have no gradient checkpointing, so train.recompute = "
                f'"{setting}" has no effect. Set train.recompute = "none".'
            )
        options = {"use_reentrant": False, "preserve_rng_state": False}
        self.theirs.gradient_checkpointing_enable(options)  # type: ignore[no-untyped-call]
        for layer, is_again in zip(self._stack, again, strict=True):
            if not hasattr(layer, "gradient_checkpointing"):
                raise ModelError(
                    f"{type(layer).__name__} of {name} has no gradient checkpointing. Set "
                    f'train.recompute = "none".'
                )
            vars(layer)["gradient_checkpointing"] = is_again


class _Pack:
    """A pack as ``attend_pack`` takes it. Not a dataclass: fully_shard would copy its fields."""

    def __init__(self, pack: PackAttention, *, is_spare: bool) -> None:
        self._pack, self._is_spare = pack, is_spare

    @property
    def doc_tokens(self) -> tuple[int, ...]:
        """The longest document, which decides whether a window hides anything."""
        return (self._pack.longest_tokens,)

    @property
    def reach_tokens(self) -> int:
        """One more than the last position of the pack, whichever rank holds it."""
        return self._pack.longest_tokens

    def agree(self, layer: object, device: torch.device) -> None:
        """Ranks compare the digest of each step's pack when it ends."""

    def attend(self, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor, scoring: Scoring) -> Tensor:
        """One layer's attention."""
        attend = self._pack.attend_scored
        if attend is None:
            raise ModelError("This pack's attention is for the layers of equipoise's own decoder.")
        if not self._is_spare:
            return attend(q_tHE, k_tGE, v_tGE, scoring)
        none_tHE = attend(q_tHE[:0], k_tGE[:0], v_tGE[:0], scoring)
        return torch.cat([none_tHE, torch.zeros_like(q_tHE)])


def _alone(doc_tokens: Sequence[int], device: torch.device) -> PackAttention:
    """A pack that is whole on this rank."""
    plain = pack_attention(doc_tokens, device)
    attend = partial(_attend_alone, doc_tokens=tuple(int(tokens) for tokens in doc_tokens))
    return PackAttention(plain.positions_T, plain.attend, attend, max(doc_tokens, default=0))


def _attend_alone(
    q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, scoring: Scoring, doc_tokens: tuple[int, ...]
) -> Tensor:
    if scoring.is_plain or not doc_tokens:
        return attend_documents(q_THE, k_TGE, v_TGE, doc_tokens)
    plan = plan_context(
        doc_tokens, 1, heads=q_THE.shape[1], kv_heads=k_TGE.shape[1], mask=scoring.mask
    )
    return attend_in_one_process(
        q_THE, k_TGE, v_TGE, plan, softcap=scoring.softcap, sinks_H=scoring.sinks_H
    )


def find_layers(theirs: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model of transformers, in order.

    Raises:
        ModelError: no list of its modules is that of its layers, or two of them share a weight.
    """
    name, config = type(theirs).__name__, theirs.config.get_text_config()
    count = int(config.num_hidden_layers)
    lists = [list(each) for each in theirs.modules() if isinstance(each, nn.ModuleList)]
    fitting = [each for each in lists if len(each) == count]
    if not fitting:
        raise ModelError(
            f"{name} has no list of {count} layers, which ZeRO gathers one by one. Choose another "
            f"model."
        )
    layers = max(fitting, key=_count_weights)
    inside = [{id(weight) for weight in layer.parameters()} for layer in layers]
    if sum(map(len, inside)) != len(set().union(*inside)):
        raise ModelError(
            f"The layers of {name} share weights, which ZeRO cannot gather layer by layer. Choose "
            f"another model."
        )
    return layers


def _count_weights(modules: Sequence[nn.Module]) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())


def reference_loss(
    theirs: PreTrainedModel, tokens_T: Tensor, doc_tokens: Sequence[int], labels_T: Tensor | None
) -> Tensor:
    """Summed loss, or logits, of transformers' own model, each document by itself.

    Args:
        theirs: A model with its own eager attention.
        tokens_T: Tokens of the documents, int64 [T].
        doc_tokens: Their lengths [tokens].
        labels_T: As for ``PackedModel``.
    """
    ends = list(accumulate(doc_tokens))
    rows = [
        theirs(input_ids=tokens_T[None, end - tokens : end], use_cache=False).logits[0]
        for end, tokens in zip(ends, doc_tokens, strict=True)
        if tokens
    ]
    logits_TV = torch.cat(rows)
    if labels_T is None:
        return logits_TV
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return cross_entropy(logits_TV.to(wide), labels_T, ignore_index=IGNORED, reduction="sum")
