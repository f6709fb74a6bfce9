"""What a model of transformers makes of its last hidden states: a product, scaled or capped.

Why
    Logits of a long pack over a large vocabulary take more memory than all else, and
    ``nn.loss.head_loss`` never keeps them. But a model may scale its logits (Granite, Cohere), cap
    them (Gemma 2), add a bias, or do something that nobody has thought of.

What it decides
    Nothing is read off a configuration. The model runs on a few tokens while its head's output is
    replaced by numbers of all magnitudes, and the logits that come out say what became of them. A
    model that does anything else computes its own logits in training.

Kept true (tests/oracle/test_engine_models.py)
    Logits made here equal the model's own, for models that scale, cap and do neither; a model that
    treats some words otherwise keeps its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Head:
    """Logits are ``cap(scale * (states @ head.T))``."""

    scale: float = 1.0
    softcap: float = 0.0
    """0 for logits that are not capped."""

    def bend(self, products: Tensor) -> Tensor:
        """Logits of products with the head."""
        logits = products if self.scale == 1.0 else products * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def read_head(theirs: PreTrainedModel) -> Head | None:
    """What a model makes of its head's product; None if it is neither scaled nor capped alone.

    Args:
        theirs: A model with its weights, its own attention, and no weight sharded.
    """
    base = theirs.base_model
    head: nn.Module | None = theirs.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        return None
    if base is theirs or any(each is head for each in base.modules()):
        return None
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(head.out_features, (1, _TOKENS), generator=source).to(theirs.device)
    shape = (1, _TOKENS, head.out_features)
    signs = torch.randint(2, shape, generator=source).double() * 2 - 1
    probe = signs * 10 ** (torch.rand(shape, generator=source, dtype=torch.float64) * 6 - 3)
    probe = probe.to(theirs.device)
    states: list[Tensor] = []
    read: list[Tensor] = []

    def note_states(_module: nn.Module, _args: Any, out: Any) -> None:
        states.append(out[0] if isinstance(out, tuple) else out.last_hidden_state)

    def note_read(_module: nn.Module, args: tuple[Tensor, ...], _out: Tensor) -> Tensor:
        read.append(args[0])
        return probe

    hooks = [base.register_forward_hook(note_states), head.register_forward_hook(note_read)]
    try:
        with torch.no_grad():
            logits = theirs(input_ids=ids, use_cache=False).logits.double()
    finally:
        for hook in hooks:
            hook.remove()
    if len(states) != 1 or len(read) != 1 or logits.shape != probe.shape:
        return None
    if not torch.equal(states[0], read[0]):
        return None
    cap = getattr(theirs.config.get_text_config(), "final_logit_softcapping", None)
    ratio = (logits / probe).median()
    guesses = [Head(), Head(scale=float(ratio))]
    if isinstance(cap, int | float) and cap > 0:
        guesses.append(Head(softcap=float(cap)))
    for guess in guesses:
        # In fp32 at least: a model may narrow its logits.
        if torch.allclose(guess.bend(probe), logits, rtol=1e-6, atol=1e-9):
            return guess
    return None
