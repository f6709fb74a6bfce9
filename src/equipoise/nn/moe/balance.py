"""Keep a router from sending all tokens to a few experts, the same on every layout.

Why
    The usual auxiliary loss multiplies each micro-batch's own counts by its own mean scores. That
    is not a sum over tokens, so it differs between packings and layouts. Here it is a sum over
    tokens like the cross-entropy, divided by the same count of labels.

What it decides
    Every rank counts, in integers, how many tokens chose each expert. At the end of a step the
    counts of all ranks are summed, which is exact in any order, and balance the *next* step.
    They are part of the model's state, so a resumed run continues unchanged.

    ``auxiliary``
        A token with scores ``p`` adds ``rate * X * sum(f * p)``, where ``f`` is each expert's
        share of the last step's choices: ``X * sum(f * p)`` is 1 at balance, and X if one expert
        had all. With the counts of the same tokens it is Switch's loss. The first step has no
        counts, and adds nothing.
    ``bias``
        No loss. A number is added to each score for the choice, but not to the choice's weight:
        ``rate`` for each step in which the expert had less than its even share, and minus
        ``rate`` for each in which it had more.
        Among experts without weights, each one with weights gets ``rate`` times the part of its
        share of ``mean_top_k`` that it lacks, or minus that which it has too many, at most
        ``rate``; those without keep a bias of 0. So the mean number of experts with weights that
        a token passes through comes to ``mean_top_k``, and stays there while the router changes.
    ``none``
        Only counts.

    Counts are taken in the backward pass, which runs once per micro-batch: a recomputed forward
    is not counted twice, and a forward without a backward is not counted.

Kept true (tests/unit/nn/moe/test_balance.py, tests/multi/parallel/test_expert.py)
    With the counts of its own tokens the loss is that of ``transformers`` over ``top_k``; its
    gradient equals autograd's; counts, biases and loss are the same on any number of ranks.

Sources
    Auxiliary loss: Switch Transformers, arXiv:2101.03961, section 2.2. Counts of all ranks
    instead of a micro-batch's: arXiv:2501.11873. Bias: arXiv:2408.15664. Experts without weights:
    LongCat-Flash, arXiv:2509.01322, section 2.1.
"""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.spec.model.presets import ModelSpec

_FINE = 1 << 16
"""Parts of ``rate`` in which biases change where they approach a mean."""


def balance_loss(scores_TX: Tensor, counts_X: Tensor) -> Tensor:
    """``X * sum(f * p)`` summed over tokens, where ``f`` is each expert's share of the counts."""
    shares_X = counts_X.to(scores_TX.dtype) / counts_X.sum()
    return len(counts_X) * (scores_TX.sum(0) @ shares_X)


def count_choices(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen, int64 [X].

    ``torch.bincount`` waits for the device, to learn the largest number.

    >>> count_choices(torch.tensor([[2, 0], [2, 1]]), 4).tolist()
    [1, 1, 2, 0]
    """
    flat = chosen.reshape(-1)
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


class _Watch(torch.autograd.Function):
    """Return scores unchanged; the backward counts and adds the auxiliary loss's gradient."""

    @staticmethod
    def forward(ctx: Any, scores_TX: Tensor, chosen_TK: Tensor, balance: "LoadBalance") -> Tensor:
        ctx.save_for_backward(scores_TX.sum(0), chosen_TK)
        ctx.balance = balance
        return scores_TX.view_as(scores_TX)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sums_X, chosen_TK = ctx.saved_tensors
        balance: LoadBalance = ctx.balance
        balance.loads_X += count_choices(chosen_TK, len(sums_X))
        if balance.rule != "auxiliary":
            return grads[0], None, None
        pull_X = balance.pull_X(sums_X.dtype)
        balance.penalty += (sums_X @ pull_X).to(balance.penalty.dtype)
        return grads[0] + balance.loss_scale * pull_X, None, None


class LoadBalance(nn.Module):
    """The counts of one layer's experts, and their effect on its router."""

    state_X: Tensor
    loads_X: Tensor
    penalty: Tensor

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.rule, self.rate, choices = model.balance, model.balance_rate, model.choices
        self.experts, self.top_k, self.mean_top_k = model.experts, model.top_k, model.mean_top_k
        self.unit = _FINE if model.identity_experts else 1
        """How much of ``state_X`` adds ``rate`` to a score under ``bias``."""
        self.loss_scale = 1.0
        """Factor of the loss before its backward: one over the count of labels."""
        # Counts of the last step; under ``bias``, how many more steps each bias went up than down.
        # Integers, so that every rank has the same.
        self.register_buffer("state_X", torch.zeros(choices, dtype=torch.int64))
        zeros = torch.zeros(choices, dtype=torch.int64)
        self.register_buffer("loads_X", zeros, persistent=False)
        self.register_buffer("penalty", torch.zeros((), dtype=torch.float64), persistent=False)

    def pull_X(self, dtype: torch.dtype) -> Tensor:
        """The gradient of the auxiliary loss by each score of any token, before ``loss_scale``.

        Zero where there are no counts yet; asking whether there are would wait for the device.
        """
        shares_X = self.state_X.to(dtype) / self.state_X.sum().clamp_min(1)
        return self.rate * len(shares_X) * shares_X

    def biased(self, scores_TX: Tensor) -> Tensor:
        """The scores by which experts are chosen."""
        if self.rule != "bias":
            return scores_TX
        return scores_TX + self.rate / self.unit * self.state_X.to(scores_TX.dtype)

    def watch(self, scores_TX: Tensor, chosen_TK: Tensor) -> Tensor:
        """The scores to make the weights from, counted in the backward."""
        out: Tensor = _Watch.apply(scores_TX, chosen_TK, self)
        return out

    def settle(self, loads_X: Tensor) -> None:
        """Adopt the counts of all ranks, and reset this rank's own."""
        if self.rule == "auxiliary":
            self.state_X.copy_(loads_X)
        elif self.rule == "bias" and self.experts == len(loads_X):
            self.state_X += torch.sign(loads_X.sum() - len(loads_X) * loads_X)
        elif self.rule == "bias":
            self.state_X[: self.experts] += self._toward_mean(loads_X)
        self.loads_X.zero_()
        self.penalty.zero_()

    def _toward_mean(self, loads_X: Tensor) -> Tensor:
        """What real experts' biases change by, for their share of ``mean_top_k``; int64 [experts].

        In float64, whose sums of whole numbers and quotients are the same on every rank.
        """
        real = loads_X[: self.experts].to(torch.float64)
        even = loads_X.sum() / self.top_k * self.mean_top_k / self.experts
        missing = (1.0 - real / even.clamp_min(1.0)).clamp_min(-1.0) * (even > 0)
        return torch.round(missing * self.unit).to(torch.int64)


def balances(module: nn.Module) -> list[LoadBalance]:
    """The load balances of a model, one for each sparse layer, in order."""
    return [each for each in module.modules() if isinstance(each, LoadBalance)]


def set_loss_scale(module: nn.Module, scale: float) -> None:
    """Set the factor of every micro-batch's loss before its backward."""
    for each in balances(module):
        each.loss_scale = scale


def collect_loads(module: nn.Module) -> tuple[Tensor, Tensor]:
    """What this rank has counted since the last ``settle_loads``.

    Returns:
        Tokens that chose each expert of each sparse layer, int64 [layers, X]; and the auxiliary
        loss, summed over tokens and layers, a float64 scalar.
    """
    layers = balances(module)
    loads = torch.stack([each.loads_X for each in layers])
    return loads, torch.stack([each.penalty for each in layers]).sum()


def forget_loads(module: nn.Module) -> None:
    """Reset what this rank has counted, without balancing anything by it."""
    for each in balances(module):
        each.loads_X.zero_()
        each.penalty.zero_()


def settle_loads(module: nn.Module, loads: Tensor) -> None:
    """Balance the next step by the counts of all ranks, int64 [layers, X]."""
    for each, loads_X in zip(balances(module), loads, strict=True):
        each.settle(loads_X)
