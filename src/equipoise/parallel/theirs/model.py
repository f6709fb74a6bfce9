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
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from equipoise.balance.context.plan import plan_context
from equipoise.base.errors import ModelError
from equipoise.nn.attention import PackAttention, Scoring, attend_documents, pack_attention
from equipoise.nn.loss import IGNORED, head_loss
from equipoise.nn.packed import PackedModel
from equipoise.parallel.context.attention import attend_in_one_process
from equipoise.parallel.theirs.head import Head
from equipoise.parallel.theirs.layers import count_weights, find_layers
from equipoise.parallel.theirs.lora import add_their_adapters, require_used
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import layer_recompute
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.spec import Recompute

CONFIG = "config.json"
PREFIX = "theirs."
"""What stands before transformers' names of weights."""


class TransformersModel(PackedModel):
    """A model of transformers whose attention comes from the registry."""

    def __init__(
        self,
        theirs: PreTrainedModel,
        model: ModelSpec,
        head: Head | None,
        config_text: str = "",
    ) -> None:
        """Wrap a model; its weights keep their names, behind ``theirs``.

        Args:
            theirs: As ``build.load_theirs`` returns it, with the registered attention.
            model: Its sizes, for prices.
            head: What its logits are; None for its own forward pass.
            config_text: The config.json that it was built from, for its checkpoints.

        Raises:
            ModelError: its decoder layers cannot be told apart from the rest.
        """
        super().__init__()
        self.theirs, self.model, self.head = theirs, model, head
        self.config_text = config_text
        self.norm = nn.Identity()
        self._stack = find_layers(theirs)
        for layer in self._stack:
            if _sometimes_used(layer):
                layer.register_forward_hook(_touch)

    @property
    def params(self) -> int:
        """Weights of the whole model, counted."""
        return count_weights([self.theirs])

    @property
    def texts(self) -> dict[str, str]:
        """The config.json that it was built from."""
        return {CONFIG: self.config_text} if self.config_text else {}

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

    def reference(
        self, tokens_T: Tensor, doc_tokens: Sequence[int], labels_T: Tensor | None = None
    ) -> Tensor:
        """Transformers' own model with eager attention, each document by itself."""
        self.theirs.set_attn_implementation("eager")
        return reference_loss(self.theirs, tokens_T, doc_tokens, labels_T)

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
        run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for at, layer in enumerate(self._stack):
            if layer_recompute(setting, at) != "full":
                continue
            if not isinstance(layer, GradientCheckpointingLayer):
                raise ModelError(
                    f"{type(layer).__name__} of {type(self.theirs).__name__} has no gradient "
                    f'checkpointing. Set train.recompute = "none".'
                )
            vars(layer).update(gradient_checkpointing=True, _gradient_checkpointing_func=run_again)

    def add_adapters(self, lora: LoraSpec, seed: int) -> None:
        """Give linear layers their adapters, in place, and let nothing else train.

        Raises:
            SpecError: a target is the name of no linear layer.
            ModelError: a layer's adapter would not be used.
        """
        adapters = add_their_adapters(self.theirs, lora, seed)
        tokens = torch.zeros(2, dtype=torch.int64, device=self.theirs.device)
        require_used(lambda: self(tokens, (len(tokens),)), adapters)


def _sometimes_used(layer: nn.Module) -> list[nn.Parameter]:
    """Weights of modules in lists, such as experts of their own, which some tokens may not use."""
    lists = [each for each in layer.modules() if isinstance(each, nn.ModuleList)]
    return [weight for each in lists for weight in each.parameters() if weight.requires_grad]


def _touch(layer: nn.Module, _args: Any, out: Any) -> Any:
    """Give every weight a gradient, if of zero: ranks must reduce the same ones."""
    weights = _sometimes_used(layer)
    if not weights or not torch.is_grad_enabled():
        return out
    nothing = 0 * torch.stack([weight.sum() for weight in weights]).sum()
    if isinstance(out, tuple):
        return (out[0] + nothing.to(out[0].dtype), *out[1:])
    return out + nothing.to(out.dtype)


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
        spare_tHE = torch.zeros_like(q_tHE)
        if scoring.sinks_H is not None:  # a gradient of zero, which other ranks' are added to
            spare_tHE = spare_tHE + 0 * scoring.sinks_H.sum()
        return torch.cat([none_tHE, spare_tHE])


def _alone(doc_tokens: Sequence[int], device: torch.device) -> PackAttention:
    """A pack that is whole on this rank."""
    plain = pack_attention(doc_tokens, device)
    attend = partial(attend_alone, doc_tokens=tuple(int(tokens) for tokens in doc_tokens))
    return PackAttention(plain.positions_T, plain.attend, attend, max(doc_tokens, default=0))


def attend_alone(
    q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, scoring: Scoring, doc_tokens: tuple[int, ...]
) -> Tensor:
    """Attention inside each document of a pack that is whole on this rank."""
    if scoring.is_plain or not doc_tokens:
        return attend_documents(q_THE, k_TGE, v_TGE, doc_tokens)
    plan = plan_context(
        doc_tokens, 1, heads=q_THE.shape[1], kv_heads=k_TGE.shape[1], mask=scoring.mask
    )
    return attend_in_one_process(
        q_THE, k_TGE, v_TGE, plan, softcap=scoring.softcap, sinks_H=scoring.sinks_H
    )


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
