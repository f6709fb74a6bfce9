"""The cases of ``equipoise check``: which runs are proven, with which packing and strategy.

Why
    Layouts, packings, ZeRO stages, strategies and shardings multiply to thousands. What may go
    wrong between two of them is proven for every pair, the rest once.

What it decides
    On *real* ranks, for each number of ranks: every ZeRO stage with every packing and with
    recomputation, without context parallelism; policies that divide documents over ranks, under
    some of the stages; then every way to write the ranks as data times
    context, with every stage, and with recomputation; then every strategy, once; then every way
    to write the ranks as data times context times tensor; then, of a model with experts, every
    number of ranks that may share them, beside each of the other ways to share; then every
    pipeline schedule that trains the same model, and pipelines with every other axis; then one
    layout of every axis with labels on some tokens only. Models are as deep as a pipeline has
    stages.

    *Played* in one process, where ranks take turns and a case takes a fraction of the time: every
    strategy with every kind of sharding, and every sharding there is.

    Models that transformers builds have the cases without tensor, expert and pipeline parallelism.

    Models with experts, and those that transformers builds, are computed in fp64. In fp32 two
    experts whose scores differ by rounding may be ranked one way on one layout and the other way on
    another, and then all that follows differs, rightly.

Kept true (tests/unit/train/check/test_case.py)
    Every stage, policy, strategy, sharding and factor of the ranks is in some case.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from equipoise.spec.catalog import POLICIES, SCHEDULES, Policy
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.model.experts import shares_experts
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import (
    ExpertsSpec,
    LayoutSpec,
    PackSpec,
    Recompute,
    RunSpec,
    Sharding,
    StrategyName,
    TrainSpec,
)

Precision = Literal["fp32", "fp64", "fp8"]

TOLERANCE = 1e-5
"""Largest error of a loss, logit or gradient in fp32, relative to its scale (design, Tests)."""

FP8_TOLERANCE = 1e-3
"""The same with float8 products. Sums in another order differ by 1e-7 as in fp32, but where one
lies on an edge between two float8 numbers, they round an element to its neighbour, up to 2^-3 away.
One such element among thousands weighs 1e-5; leaving out the rounding weighs 1e-2."""

FP64_TOLERANCE = 1e-10
"""The same in fp64."""

DOCUMENT_TOKENS = (173, 5, 1, 64, 97, 31, 8, 129, 2, 40, 77, 200)

STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)

_UNDIVIDED = [
    name
    for name, traits in POLICIES.items()
    if not (traits.divides or traits.lets_wait or traits.is_slow)
]
_ALONE = ["in-order", PackSpec().policy]
"""Policies of one rank, which shares documents with nobody: as they come, and the default."""
_TOGETHER = [name for name, traits in POLICIES.items() if traits.runs_together]

_WINDOWS = (512, 256)
"""Windows that make few and many micro-batches [tokens]."""

_SHARDINGS: tuple[Sharding, ...] = ("contiguous", "head-tail-document", "mixed")
"""One of each kind: uneven work, every document on every rank, short documents whole."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run of one step, to be compared with one rank."""

    ranks: int
    model: ModelSpec
    layout: LayoutSpec
    pack: PackSpec
    train: TrainSpec
    precision: Precision = "fp32"
    """Dtype of weights and activations; ``fp8`` is fp32 with float8 products in dense layers."""
    tolerance: float = TOLERANCE
    """Largest error of a loss, logit or gradient, relative to its scale."""
    doc_tokens: tuple[int, ...] = DOCUMENT_TOKENS
    """Lengths of the documents of the step."""
    repeats: bool = False
    """Whether the step runs twice and must have the same bits."""
    masks: bool = False
    """Whether only some tokens have a label, as in conversations."""
    played: bool = False
    """Meant for ranks that take turns in one process."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    """Adapters that are trained instead of the weights."""
    theirs: str = ""
    """Configuration of the model that transformers builds, as ``parallel.theirs.shrink`` writes it;
    empty for a decoder of our own."""

    experts: ExpertsSpec = field(default_factory=ExpertsSpec)
    """Which ranks compute which experts' rows."""
    router: str = ""
    """The kind of workload that routers are biased to; empty for none."""
    vision: VisionSpec = field(default_factory=VisionSpec)
    audio: AudioSpec = field(default_factory=AudioSpec)
    """Encoders of items among the documents; none unless they have layers."""

    @property
    def resolved(self) -> ResolvedFile:
        """The same as a launcher hands it to the ranks of a run."""
        spec = RunSpec(
            pack=self.pack,
            train=self.train,
            layout=self.layout,
            lora=self.lora,
            experts=self.experts,
            vision=self.vision,
            audio=self.audio,
        )
        return ResolvedFile(spec, self.model, {}, self.ranks, "", "")

    def __str__(self) -> str:
        layout = self.layout
        where = (
            f"{self.ranks} ranks played in one process" if self.played else f"{self.ranks} ranks"
        )
        parts = [f"zero = {layout.zero}", f'policy = "{self.pack.policy}"']
        if layout.cp > 1:
            parts = [f"cp = {layout.cp}", f"{layout.strategy}, {layout.sharding}"]
            parts += [] if self.played else [f"zero = {layout.zero}"]
        degrees = {"tp": layout.tp, "ep": layout.ep, "etp": layout.etp}
        parts += [f"{axis} = {ranks}" for axis, ranks in degrees.items() if ranks > 1]
        parts += [f"pp = {layout.pp}, {layout.schedule}"] if layout.pp > 1 else []
        parts += [f"replicas = {layout.replicas}"] if layout.replicas > 1 else []
        parts += [f"{self.experts.policy} experts, {self.router}"] if self.router else []
        parts += ["shortcut"] if self.model.shortcut else []
        parts += ["masked labels"] if self.masks else []
        parts += ["images and sound"] if self.resolved.spec.encoders else []
        parts += [f"lora of rank {self.lora.rank}"] if self.lora.rank else []
        parts += [f"{', '.join(self.train.freeze)} frozen"] if self.train.freeze else []
        return f"{where} ({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Errors of a case against one rank, and against its own second run."""

    case: Case
    micro_batches: int
    """Micro-batches of the rank that has most."""
    loss_error: float
    forward_error: float
    """Error of the logits."""
    gradient_error: float
    worst_parameter: str
    bytes: int
    """Sent between ranks by attention and between stages, counted as they were sent [bytes]."""
    messages: int
    scheduled_bytes: int | None
    """Bytes that the schedules plan to send; None where layers have schedules of their own."""
    scheduled_messages: int | None
    skew: float
    """Predicted load of the fullest rank over the mean."""
    is_repeated: bool = True
    """Whether a second run, where the case has one, had the same bits."""

    @property
    def error(self) -> float:
        """The largest of all."""
        return max(self.loss_error, self.forward_error, self.gradient_error)

    @property
    def strain(self) -> float:
        """The error over what is allowed."""
        return self.error / self.case.tolerance

    @property
    def is_exact(self) -> bool:
        """Within the tolerance, the same again, and nothing sent that no schedule says."""
        scheduled = (self.scheduled_bytes, self.scheduled_messages)
        is_scheduled = scheduled in ((self.bytes, self.messages), (None, None))
        return self.strain <= 1.0 and self.is_repeated and is_scheduled


def make_case(
    model: ModelSpec,
    ranks: int,
    *,
    policy: Policy = "by-work",
    context_tokens: int = 256,
    recompute: Recompute = "none",
    played: bool = False,
    **layout: Any,
) -> Case:
    """A case of this model, which is deepened where a pipeline has more stages than layers.

    Args:
        model: Its sizes.
        ranks: In all; the layout's ``dp`` is what the other degrees leave.
        policy: Of the pack.
        context_tokens: Its window [tokens].
        recompute: What layers make again in the backward.
        played: On ranks that take turns in one process.
        layout: Fields of ``LayoutSpec``; two ranks to a node where they divide the context.
    """
    spec = LayoutSpec(**layout)
    per_node = 2 if spec.cp % 2 == 0 else None
    precision: Precision = "fp64" if model.experts else "fp32"
    return Case(
        ranks,
        deepen(model, spec.stages),
        dataclasses.replace(spec, dp=ranks // spec.sharing, ranks_per_node=per_node),
        PackSpec(policy=policy, context_tokens=context_tokens, step_tokens=sum(DOCUMENT_TOKENS)),
        TrainSpec(recompute=recompute),
        precision=precision,
        tolerance=FP64_TOLERANCE if precision == "fp64" else TOLERANCE,
        played=played,
    )


def scaled_down(model: ModelSpec) -> ModelSpec:
    """The same model with 2 layers, a narrow width and at most 512 words."""
    narrow = 2 * model.heads * max(4, -(-64 // (2 * model.heads)))
    model = model.scaled(layers=min(2, model.layers), hidden=min(narrow, model.hidden))
    return dataclasses.replace(
        model,
        vocab=min(512, model.vocab),
        dense_layers=min(1, model.dense_layers),  # so that one of two layers has experts
        expert_every=min(2, model.expert_every),
    )


def deepen(model: ModelSpec, stages: int) -> ModelSpec:
    """The model with a layer for each stage at least."""
    return dataclasses.replace(model, layers=max(model.layers, stages))


def all_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Every ZeRO stage with every packing, each of both with few and with many micro-batches.

    One rank shares documents with no other, so two packings are enough.
    """
    cases = []
    for zero in STAGES:
        for turn, policy in enumerate(_UNDIVIDED if ranks > 1 else _ALONE):
            window = _WINDOWS[(zero + turn) % 2]
            cases.append(make_case(model, ranks, policy=policy, context_tokens=window, zero=zero))
        cases.append(make_case(model, ranks, context_tokens=512, recompute="full", zero=zero))
    return cases


def divided_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Policies that divide documents over ranks, each under some ZeRO stages."""
    cases = []
    for turn, policy in enumerate(_TOGETHER if ranks > 1 else ()):
        make = partial(make_case, model, ranks, policy=policy)
        first, second = STAGES[(ranks + turn) % 4], STAGES[(ranks + turn + 2) % 4]
        again: Recompute = "full" if turn % 2 else "none"
        # Windows of 128 are shorter than documents: each must be divided.
        cases += [make(zero=first), make(zero=second, context_tokens=128, recompute=again)]
    return cases


def context_cases(
    ranks: int,
    model: ModelSpec,
    strategy: StrategyName = "needed-kv",
    sharding: Sharding = "mixed",
) -> list[Case]:
    """Every way to share micro-batches between real ranks, and every strategy once.

    Args:
        ranks: In all.
        model: Its sizes.
        strategy: Of the cases that vary something else: the run's own.
        sharding: Likewise.
    """
    cases = []
    for context in divisors(ranks):
        make = partial(make_case, model, ranks, cp=context, strategy=strategy, sharding=sharding)
        cases += [
            *(make(zero=zero) for zero in STAGES),
            make(policy="in-order", context_tokens=512, recompute="full"),
            make(zero=3, context_tokens=512, recompute="full"),
        ]
    if ranks > 1:
        make = partial(make_case, model, ranks, cp=ranks, sharding="head-tail-document")
        cases += [make(strategy=each, context_tokens=512) for each in get_args(StrategyName)]
    return cases


def tensor_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Every way to share weights between real ranks, alone and with context ranks."""
    cases = []
    for tensor in divisors(ranks, of=model.heads):
        for context in (1, *divisors(ranks // tensor)):
            make = partial(make_case, model, ranks, cp=context, tp=tensor)
            cases += [
                *(make(zero=zero) for zero in STAGES),
                make(policy="in-order", context_tokens=512, recompute="full"),
                make(zero=3, context_tokens=512, recompute="full"),
            ]
            if context == 1:
                alone = tensor == ranks  # one data-parallel rank has nobody to divide with
                policies = ["divided"] if alone else _TOGETHER
                window = 1024 if alone else 128
                cases += [
                    make(policy=policy, zero=zero, context_tokens=window)
                    for zero, policy in zip(STAGES, policies, strict=False)
                ]
    return cases


def expert_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Every way to share experts between real ranks, which share other things or nothing."""
    cases: list[Case] = []
    experts = model.experts
    if not experts:
        return cases
    for expert in divisors(ranks):
        if shares_experts(experts, expert):
            make = partial(make_case, model, ranks, ep=expert)
            cases += [
                *(make(zero=zero) for zero in STAGES),
                make(policy="divided", context_tokens=128),
                make(zero=3, context_tokens=512, recompute="full"),
                make(cp=ranks, zero=2),
            ]
            cases += [make(tp=ranks)] if model.heads % ranks == 0 else []
    for split in divisors(ranks):
        expert = ranks // split if experts % (ranks // split) == 0 else 1
        make = partial(make_case, model, ranks, ep=expert, etp=split)
        cases += [make(), make(zero=3, context_tokens=512, recompute="full")]
    return cases


def pipeline_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Every schedule that trains the same model, and pipelines with every other axis."""
    cases = []
    for stages in divisors(ranks):
        make = partial(make_case, model, ranks, pp=stages, policy="in-order", context_tokens=64)
        cases += [
            make(schedule=name)
            for name, traits in SCHEDULES.items()
            # Of many stages, some need more micro-batches than the sample has.
            if not traits.is_lossy and (stages == 2 or not traits.batches_per_rank)
        ]
        cases += [
            make(zero=0, schedule="zb-h1"),
            make(context_tokens=256, policy="by-work", recompute="full"),
        ]
        cases += [make(cp=n, schedule="zb-v") for n in divisors(ranks // stages)]
        cases += [make(tp=n) for n in divisors(ranks // stages, of=model.heads)]
    return cases


def played_cases(ranks: int, model: ModelSpec) -> list[Case]:
    """Every strategy with every kind of sharding, and every sharding, on ranks that are played."""
    if ranks < 2:
        return []
    pairs: list[tuple[StrategyName, Sharding]] = [
        (strategy, sharding) for strategy in get_args(StrategyName) for sharding in _SHARDINGS
    ]
    pairs += [("needed-kv", each) for each in get_args(Sharding) if each not in _SHARDINGS]
    make = partial(make_case, model, ranks, cp=ranks, zero=0, context_tokens=512, played=True)
    return [make(strategy=strategy, sharding=sharding) for strategy, sharding in pairs]


def divisors(ranks: int, *, of: int = 0) -> list[int]:
    """Divisors of the ranks above 1; of another number too, where one is given.

    >>> divisors(6), divisors(6, of=4)
    ([2, 3, 6], [2])
    """
    return [n for n in range(2, ranks + 1) if ranks % n == 0 and of % n == 0]
