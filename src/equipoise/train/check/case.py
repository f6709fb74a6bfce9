"""The cases of ``equipoise check``: which layouts are proven, with which packing and strategy.

Why
    Layouts, packings, ZeRO stages, strategies and shardings multiply to thousands. What may go
    wrong between two of them is proven for every pair, the rest once.

What it decides
    On *real* ranks, for each number of ranks: every ZeRO stage with every packing and with
    recomputation, without context parallelism; policies that divide documents over ranks, under
    some of the stages; then every way to write the ranks as data times
    context, with every stage, and with recomputation; then every strategy, once; then every way
    to write the ranks as data times context times tensor; then, of a model with experts, every
    number of ranks that may share them, beside each of the other ways to share.

    *Played* in one process, where a case takes a twentieth of the time: every strategy with
    every kind of sharding, and every sharding there is.

Kept true (tests/unit/train/check/test_case.py)
    Every stage, policy, strategy, sharding and factor of the ranks is in some case.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from equipoise.spec.catalog import POLICIES, Policy
from equipoise.spec.run.spec import LayoutSpec, PackSpec, Recompute, Sharding, StrategyName

TOLERANCE = 1e-5
"""Largest error of a loss, logit or gradient in fp32, relative to its scale (design, Tests)."""

_STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)

_UNDIVIDED = [
    name
    for name, traits in POLICIES.items()
    if not (traits.divides or traits.lets_wait or traits.is_slow)
]
_ALONE = ["in-order", PackSpec().policy]
"""Of one rank, which shares documents with nobody: as they come, and the default."""
_TOGETHER = [name for name, traits in POLICIES.items() if traits.runs_together]

_WINDOWS = (512, 256)
"""Of few and of many micro-batches [tokens]."""

_SHARDINGS: tuple[Sharding, ...] = ("contiguous", "head-tail-document", "mixed")
"""One of each kind: uneven work, every document on every rank, short documents whole."""


@dataclass(frozen=True, slots=True)
class Case:
    """One layout, packing and strategy to be proven."""

    ranks: int
    zero: Literal[0, 1, 2, 3]
    policy: Policy
    context_tokens: int
    recompute: Recompute
    cp: int = 1
    """Ranks that share each micro-batch."""
    strategy: StrategyName = "needed-kv"
    sharding: Sharding = "mixed"
    tp: int = 1
    """Ranks that share the weights of each layer."""
    ep: int = 1
    """Ranks that share the experts of each layer."""
    etp: int = 1
    """Ranks that share the hidden units of each expert."""
    pp: int = 1
    """Ranks that share the layers."""
    schedule: str = "1f1b"
    """Of a pipeline: who runs what when."""
    played: bool = False
    """All ranks in one process, without data parallelism and ZeRO."""

    @property
    def shares_weights(self) -> bool:
        """Whether ranks hold other parts of the model than ZeRO gives them."""
        return max(self.tp, self.ep, self.etp) > 1

    @property
    def layout(self) -> LayoutSpec:
        """The same as run.toml says it; two ranks to a node where they divide."""
        return LayoutSpec(
            dp=self.ranks // (self.cp * self.tp * self.pp),
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
            strategy=self.strategy,
            sharding=self.sharding,
            ranks_per_node=2 if self.cp % 2 == 0 else None,
            zero=self.zero,
        )

    def __str__(self) -> str:
        where = (
            f"{self.ranks} ranks played in one process" if self.played else f"{self.ranks} ranks"
        )
        parts = [f"zero = {self.zero}", f'policy = "{self.policy}"']
        if self.cp > 1:
            parts = [f"cp = {self.cp}", f"{self.strategy}, {self.sharding}"]
            parts += [] if self.played else [f"zero = {self.zero}"]
        parts += [f"tp = {self.tp}"] if self.tp > 1 else []
        parts += [f"ep = {self.ep}"] if self.ep > 1 else []
        parts += [f"etp = {self.etp}"] if self.etp > 1 else []
        parts += [f"pp = {self.pp}, {self.schedule}"] if self.pp > 1 else []
        return f"{where} ({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a case is from one rank."""

    case: Case
    micro_batches: int
    """Of the rank that has most."""
    loss_error: float
    forward_error: float
    """Of the logits."""
    gradient_error: float
    worst_parameter: str
    bytes: int
    """That attention sent between ranks, counted as they were sent, in both passes [bytes]."""
    messages: int
    scheduled_bytes: int
    """What the schedules say is sent [bytes]."""
    scheduled_messages: int
    skew: float
    """Predicted load of the fullest rank over the mean."""

    @property
    def error(self) -> float:
        """The largest of all."""
        return max(self.loss_error, self.forward_error, self.gradient_error)

    @property
    def is_exact(self) -> bool:
        """Within the tolerance, and nothing was sent that the schedule does not say."""
        sent = (self.bytes, self.messages) == (self.scheduled_bytes, self.scheduled_messages)
        return self.error <= TOLERANCE and sent


def all_cases(ranks: int) -> list[Case]:
    """Every ZeRO stage with every packing, each of both with few and with many micro-batches.

    One rank has nobody to share documents with, so two packings will do.
    """
    cases = []
    for zero in _STAGES:
        for turn, policy in enumerate(_UNDIVIDED if ranks > 1 else _ALONE):
            window = _WINDOWS[(zero + turn) % 2]
            cases.append(Case(ranks, zero, policy, window, "none"))
        cases.append(Case(ranks, zero, "by-work", 512, "full"))
    return cases


def divided_cases(ranks: int) -> list[Case]:
    """Policies that divide documents over ranks, each under some ZeRO stages."""
    cases = []
    for turn, policy in enumerate(_TOGETHER if ranks > 1 else ()):
        stages = (_STAGES[(ranks + turn) % 4], _STAGES[(ranks + turn + 2) % 4])
        cases += [
            Case(ranks, stages[0], policy, 256, "none"),
            # Windows that are shorter than documents: each must be divided.
            Case(ranks, stages[1], policy, 128, "full" if turn % 2 else "none"),
        ]
    return cases


def context_cases(
    ranks: int, strategy: StrategyName = "needed-kv", sharding: Sharding = "mixed"
) -> list[Case]:
    """Every way to share micro-batches between so many real ranks, and every strategy once.

    Args:
        ranks: In all.
        strategy: Of the cases that vary something else: the run's own.
        sharding: Likewise.
    """
    cases = []
    for context in [n for n in range(2, ranks + 1) if ranks % n == 0]:
        own = (context, strategy, sharding)
        cases += [
            *(Case(ranks, zero, "by-work", 256, "none", *own) for zero in _STAGES),
            Case(ranks, 1, "in-order", 512, "full", *own),
            Case(ranks, 3, "by-work", 512, "full", *own),
        ]
    if ranks > 1:
        cases += [
            Case(ranks, 1, "by-work", 512, "none", ranks, each, "head-tail-document")
            for each in get_args(StrategyName)
        ]
    return cases


_SHARED = Case(1, 1, "by-work", 256, "none")


def tensor_cases(ranks: int, heads: int) -> list[Case]:
    """Every way to share weights between so many real ranks, alone and with context ranks.

    Args:
        ranks: In all.
        heads: Query heads of the model, which the ranks must divide.
    """
    cases = []
    for tensor in [n for n in range(2, ranks + 1) if ranks % n == 0 and heads % n == 0]:
        for context in [n for n in range(1, ranks // tensor + 1) if ranks // tensor % n == 0]:
            own = dataclasses.replace(_SHARED, ranks=ranks, cp=context, tp=tensor)
            cases += [
                *(dataclasses.replace(own, zero=zero) for zero in _STAGES),
                dataclasses.replace(own, policy="in-order", context_tokens=512, recompute="full"),
                dataclasses.replace(own, zero=3, context_tokens=512, recompute="full"),
            ]
            if context == 1:
                alone = tensor == ranks  # one data-parallel rank has nobody to divide with
                cases += [
                    dataclasses.replace(
                        own, policy=each, zero=zero, context_tokens=1024 if alone else 128
                    )
                    for zero, each in zip(
                        _STAGES, ["divided"] if alone else _TOGETHER, strict=False
                    )
                ]
    return cases


def expert_cases(ranks: int, experts: int, heads: int) -> list[Case]:
    """Every way to share experts between so many real ranks, which share other things or nothing.

    Args:
        ranks: In all.
        experts: Of a layer; 0 where there are none to share.
        heads: Query heads, which tensor-parallel ranks must divide.
    """
    cases = []
    for expert in [n for n in range(2, ranks + 1) if ranks % n == 0]:
        if experts and -(-experts // -(-experts // expert)) == expert:  # none is left without
            own = dataclasses.replace(_SHARED, ranks=ranks, ep=expert)
            cases += [
                *(dataclasses.replace(own, zero=zero) for zero in _STAGES),
                dataclasses.replace(own, policy="divided", context_tokens=128),
                dataclasses.replace(own, zero=3, context_tokens=512, recompute="full"),
                dataclasses.replace(own, cp=ranks, zero=2),
            ]
            cases += [dataclasses.replace(own, tp=ranks)] if heads % ranks == 0 else []
    for split in [n for n in range(2, ranks + 1) if ranks % n == 0 and experts]:
        expert = ranks // split if experts % (ranks // split) == 0 else 1
        own = dataclasses.replace(_SHARED, ranks=ranks, ep=expert, etp=split)
        cases += [own, dataclasses.replace(own, zero=3, context_tokens=512, recompute="full")]
    return cases


def played_cases(ranks: int) -> list[Case]:
    """Every strategy with every kind of sharding, and every sharding, on ranks that are played."""
    if ranks < 2:
        return []
    pairs: list[tuple[StrategyName, Sharding]] = [
        (strategy, sharding) for strategy in get_args(StrategyName) for sharding in _SHARDINGS
    ]
    pairs += [("needed-kv", each) for each in get_args(Sharding) if each not in _SHARDINGS]
    return [Case(ranks, 0, "by-work", 512, "none", ranks, *pair, played=True) for pair in pairs]
