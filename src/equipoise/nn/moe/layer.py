"""A feed-forward of experts: each token passes through the few that the router chose for it.

What it decides
    Which experts compute which tokens. ``parallel.expert.exchange`` decides where experts live: it
    sets ``exchange``, which sends rows to their expert's rank and brings the outputs back.

    ::

        x_TD -> router -> choose -> sort rows -> experts -> gather back, weighted -> + residual
                                       (exchange)   (exchange)
        x_TD -> shared expert, if any --------------------------------------------> + residual

    Experts without weights return their input: it is added here, weighted, and nothing is sorted,
    sent or computed for them.

    ``start`` and ``finish`` are the two halves of the forward. Between them rows may travel, where
    the exchange has ``steps``, while what the caller runs in between is computed; and outputs
    travel back while the shared expert is. ``DecoderLayer`` runs attention in between if the model
    has a shortcut, which also lets experts read what attention reads.

    Scores are a softmax over all experts, in fp32 at least. A token weights its experts by their
    scores, scaled to sum to one if ``norm_top_k``.

Kept true (tests/unit/nn/moe/test_layer.py, tests/oracle/test_moe_transformers.py)
    Equal to a loop over tokens and experts, and to the blocks of Mixtral and Qwen 2 MoE in
    ``transformers``, in outputs and all gradients. Zero tokens, in all or for an expert, are legal.

Shapes: T tokens, K choices of a token, R rows, X experts, D model width, F expert width.

Sources
    Shortcut: ScMoE, arXiv:2404.05019, and LongCat-Flash, arXiv:2509.01322, section 2.2. Both join
    experts to the stream one sublayer later than they leave it; so does this.
    Mixtral: arXiv:2401.04088. Shared experts: DeepSeekMoE, arXiv:2401.06066; with a gate, Qwen 2:
    arXiv:2407.10671. Experts without weights: LongCat-Flash, arXiv:2509.01322.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from equipoise.nn.declare import Copied, Placement, local
from equipoise.nn.moe.balance import LoadBalance
from equipoise.nn.moe.matmul import expert_swiglu
from equipoise.nn.moe.route import ExpertRows, choose, gather_back, sort_rows, spread
from equipoise.nn.project import add_swiglu
from equipoise.spec.model.presets import ModelSpec


class ExpertMatrix(nn.Module):
    """One matrix of every expert, as ``weight`` [X, out, in]."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns))
        nn.init.normal_(self.weight, std=0.02)

    @property
    def local(self) -> Tensor:
        """The matrices of the experts on this rank."""
        return local(self.weight)


class Experts(nn.Module):
    """SwiGLU of every expert, on rows that are sorted by expert."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate = ExpertMatrix(model.experts, model.expert_ffn, model.hidden)
        self.up = ExpertMatrix(model.experts, model.expert_ffn, model.hidden)
        self.down = ExpertMatrix(model.experts, model.hidden, model.expert_ffn)
        self.elsewhere: Callable[[Tensor, Tensor], Tensor] | None = None
        """From rows [R, D] and rows per expert [X] to [R, D], where weights do not stay here."""

    def forward(
        self, x_RD: Tensor, counts_X: Tensor, compute: "ExpertProducts | None" = None
    ) -> Tensor:
        """Outputs [R, D]; rows are grouped by local expert, ``counts_X`` rows each.

        ``compute`` instead of ``expert_swiglu`` where rows of other ranks' experts are among them.
        """
        if self.elsewhere is not None:
            return self.elsewhere(x_RD, counts_X)
        weights = self.gate.local, self.up.local, self.down.local
        if compute is not None:
            return compute(x_RD, counts_X, *weights)
        return expert_swiglu(x_RD, counts_X.cumsum(0).to(torch.int32), *weights)


ExpertProducts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""From rows [R, D], the rows per place and this rank's gates, up and down projections to [R, D]."""


Exchange = Callable[[Tensor, Tensor, Experts], Tensor]
"""From rows sorted by expert [R, D], the rows per expert [X] and this rank's experts to the
outputs of the rows [R, D]."""


ExchangeSteps = Generator[None, None, Tensor]
"""An exchange that pauses twice: once rows have left, and once outputs have left; then returns
the outputs of the rows [R, D]."""


@runtime_checkable
class SteppedExchange(Protocol):
    """An exchange that lets its caller compute while rows travel."""

    def __call__(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> Tensor:
        """As ``Exchange``."""

    def steps(self, x_RD: Tensor, counts_X: Tensor, experts: Experts) -> ExchangeSteps:
        """The same, in steps."""


def run_steps(steps: ExchangeSteps) -> Tensor:
    """What an exchange returns at its end."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            outputs: Tensor = ended.value
            return outputs


@dataclass(frozen=True, slots=True, eq=False)
class RowsAway:
    """Rows that tokens became, perhaps on their way to experts."""

    x_TD: Tensor
    """The tokens."""
    rows: ExpertRows
    weights_TK: Tensor
    own_T1: Tensor | None
    """Weight of what a token's experts without weights return."""
    x_RD: Tensor
    steps: ExchangeSteps | None
    """The exchange that has begun, if it can pause."""


class SharedExpert(nn.Module):
    """A SwiGLU that every token passes through, behind a gate if the model has one."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.shared_ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.shared_ffn, bias=False)
        self.down = nn.Linear(model.shared_ffn, model.hidden, bias=False)
        self.switch = nn.Linear(model.hidden, 1, bias=False) if model.shared_gate else None

    def forward(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        """``residual + gate * swiglu(x)``."""
        weights = [local(part.weight) for part in (self.gate, self.up, self.down)]
        if self.switch is None:
            return add_swiglu(residual_TD, x_TD, *weights)
        y_TD = add_swiglu(torch.zeros_like(x_TD), x_TD, *weights)
        gate_T1 = torch.sigmoid(x_TD @ local(self.switch.weight).t())
        return torch.addcmul(residual_TD, gate_T1, y_TD)


_LEAST_SUM = 1e-20
"""Added to a sum of weights, as DeepSeek-V3's router does; it changes no bit of usual sums."""


def _sum_to_one(weights_TK: Tensor) -> Tensor:
    """Each token's weights over their sum.

    A token's only weight becomes 1 whatever its score is, so the score has a gradient of zero. The
    quotient's backward leaves rounding instead, which differs between layouts, and NaN where the
    score has underflowed to zero. Where a bias chooses experts whose scores all have underflowed,
    their weights are 0.
    """
    if weights_TK.shape[1] == 1:
        return weights_TK * 0.0 + 1.0
    return weights_TK / (weights_TK.sum(1, keepdim=True) + _LEAST_SUM)


class Router(nn.Module):
    """Scores the experts and chooses some for each token."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.choices, model.hidden))
        nn.init.normal_(self.weight, std=0.02)
        self.balance = LoadBalance(model)
        self.top_k, self.normalizes = model.top_k, model.norm_top_k
        self.capacity_factor = model.capacity_factor
        self.experts, self.identities = model.experts, model.identity_experts

    def forward(self, x_TD: Tensor) -> tuple[Tensor, ExpertRows, Tensor | None]:
        """Weights of each token's experts [T, K], and the rows that the experts compute.

        The last is the weight of what a token's experts without weights return, [T, 1]; None in a
        model without them.
        """
        # In bf16 two experts often have equal logits; fp32 separates them.
        wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        scores_TX = torch.softmax(x_TD.to(wide) @ local(self.weight).to(wide).t(), dim=1)
        with torch.no_grad():
            chosen_TK = choose(self.balance.biased(scores_TX), self.top_k)
        weights_TK = self.balance.watch(scores_TX, chosen_TK).gather(1, chosen_TK)
        rows = sort_rows(
            chosen_TK,
            weights_TK.detach(),
            experts=self.experts,
            factor=self.capacity_factor,
            identities=self.identities,
        )
        if self.normalizes:
            weights_TK = _sum_to_one(weights_TK)
        own_T1 = None
        if self.identities:
            own_T1 = (weights_TK * (chosen_TK >= self.experts)).sum(1, keepdim=True).to(x_TD.dtype)
        return weights_TK.to(x_TD.dtype), rows, own_T1


class MixtureOfExperts(nn.Module):
    """The feed-forward of a sparse layer."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.router = Router(model)
        self.experts = Experts(model)
        self.shared = SharedExpert(model) if model.shared_ffn else None
        self.exchange: Exchange | SteppedExchange | None = None
        """How rows reach experts on other ranks; None if all experts are here."""

    def declare(self) -> dict[str, Placement]:
        """Copied to ranks that split other layers' weights: each computes its own tokens."""
        return {name: Copied() for name, _ in self.named_parameters()}

    def forward(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        """``residual + experts(x) + shared(x)`` for this rank's tokens."""
        return self.finish(residual_TD, x_TD, self.start(x_TD))

    def start(self, x_TD: Tensor, *, travels: bool = False) -> RowsAway:
        """Choose experts for this rank's tokens.

        ``travels`` lets their rows leave at once, where the exchange can; ``finish`` must follow,
        at the same place on all ranks.
        """
        weights_TK, rows, own_T1 = self.router(x_TD)
        x_RD, steps = spread(x_TD, rows), None
        if travels and isinstance(self.exchange, SteppedExchange):
            steps = self.exchange.steps(x_RD, rows.counts_X, self.experts)
            next(steps)
        return RowsAway(x_TD, rows, weights_TK, own_T1, x_RD, steps)

    def finish(self, residual_TD: Tensor, x_TD: Tensor, away: RowsAway) -> Tensor:
        """``residual + experts + shared(x)``; the experts' input was that of ``start``."""
        if away.steps is not None:
            next(away.steps)
        else:
            y_RD = self._compute(away.x_RD, away.rows.counts_X)
        if self.shared is not None:
            residual_TD = self.shared(residual_TD, x_TD)
        if away.own_T1 is not None:
            residual_TD = torch.addcmul(residual_TD, away.own_T1, away.x_TD)
        if away.steps is not None:
            y_RD = run_steps(away.steps)
        return gather_back(residual_TD, y_RD, away.weights_TK, away.rows)

    def _compute(self, x_RD: Tensor, counts_X: Tensor) -> Tensor:
        if self.exchange is not None:
            return self.exchange(x_RD, counts_X, self.experts)
        y_RD: Tensor = self.experts(x_RD, counts_X)
        return y_RD
