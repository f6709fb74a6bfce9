"""How long a step takes on a cluster that is not here, and whether it fits: one call.

Why
    A person at a shell, a notebook, a bench and the planner ask the same question and must get the
    same answer, or the same refusal.

What it decides
    A step is requested by names and words as ``equipoise simulate`` takes them, or by the specs
    that they stand for. A setting that would change nothing is refused: its giver would read an
    answer to another question.

Kept true (tests/unit/sim/test_request.py, tests/unit/cli/simulate)
    The answer is what ``equipoise simulate --json`` prints; each refusal has one sentence.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from equipoise.base.errors import LayoutError, SpecError
from equipoise.base.fields import plain_fields
from equipoise.base.nearest import nearest
from equipoise.cost.step.request import Precision, StepOptions, residuals_of
from equipoise.sim.answer import StepAnswer, fitting_changes
from equipoise.sim.divided import DividedStep
from equipoise.sim.drawn import MOST_TOKENS, require_documents, step_packer
from equipoise.sim.faults import (
    FaultOptions,
    FaultRun,
    Month,
    price_days,
    read_faults,
    run_with_faults,
)
from equipoise.sim.jitter import run_with_jitter
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.replay import run_layered, run_sites
from equipoise.sim.mixed.require import require_kernel_prices, require_no_offload
from equipoise.sim.mixed.words import CONTEXT_STRATEGIES, read_layers
from equipoise.sim.settle.experts import require_loads, with_loads
from equipoise.sim.step import Documents, StepRun
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.layout import ORDERS, Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import OFFLOADS, Offload
from equipoise.spec.program.file import read_program
from equipoise.spec.program.spec import DEFAULT, ProgramSpec
from equipoise.spec.recompute import read_recompute, require_modules
from equipoise.spec.words import LayoutWords, read_layout, read_model

_MOST_SEQUENCES = 1 << 20
"""Each micro-batch of a step is replayed."""

_MOST_SKEW = 1 << 20
"""No more ranks than that share experts."""
_CHECKPOINT_S, _RESTART_S = 30.0, 600.0

_FAULT_STEPS = 100_000
"""Long enough that goodput no longer moves in its third digit."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A step to be priced: a model, a cluster, a layout, and what one step trains.

    Names and words are those of ``equipoise simulate``.
    """

    model: str | ModelSpec
    """A known model, ``layers=..,hidden=..,heads=..,vocab=..``, or the path of a config.json."""
    cluster: str | ClusterSpec
    """``h100-sxm:8192``, or the path of a cluster.toml."""
    layout: str | Layout
    """``tp=8,pp=16,dp=64,zero=1,virtual=2``, or degrees."""
    context_tokens: int
    """Window: tokens of a sequence."""
    step_sequences: int
    """Sequences of one step, over all ranks."""
    micro_batch: int = 1
    """Sequences of one micro-batch."""
    virtual: int = 1
    """Stages of each pipeline rank, beside a ``Layout``; words have their own ``virtual=``."""
    schedule: str | None = None
    """Order of a pipeline's work; None: 1f1b, and interleaved where virtual is above 1."""
    recompute: str = "none"
    offload: Offload = "none"
    precision: Precision = "bf16"
    context_strategy: str | None = None
    """What travels between context ranks; None: what the program takes by itself."""
    order: Literal["dp-pp", "pp-dp"] | None = None
    """Which of two axes is outermost; None: that of a ``Layout``, and for words the program's."""
    program: str | ProgramSpec = DEFAULT
    """The program that trains: a shipped one, or the path of a program.toml."""
    layers: str | None = None
    """Strategies of layers, run after run, as ``12:tp=2,dp=4,zero=1:full 20:tp=1,dp=8:none``."""
    expert_skew: float = 1.0
    """Rows of the expert rank that has most, over the mean [ratio]."""
    expert_loads: str | None = None
    """What routers choose: ``W0`` to ``W7``, or a run's folder; instead of ``expert_skew``."""
    expert_policy: str = "fixed"
    """What balances them."""
    expert_slots: int = 1
    """Most copies of experts on a rank."""
    lengths: str | Sequence[int] | None = None
    """Document lengths: a distribution, a file or the lengths [tokens]; None: full windows."""
    documents: Documents | None = None
    """Micro-batches that are packed already: document lengths of each micro-batch of each
    data-parallel rank [tokens], in place of ``lengths``."""
    policy: str | None = None
    """``pack.policy`` for ``lengths``; None: by-work."""
    seed: int = 0
    """Seed of the documents drawn, of jitter and of failures."""
    jitter: float | None = None
    """Standard deviation of a pass's time over its mean, 0 to 1."""
    mtbf_hours: float | None = None
    """Mean time between failures of one device; None: nothing fails."""
    checkpoint_s: float | None = None
    """Time for which a checkpoint stops training [s]; None: 30 s."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints; None: Young's interval."""
    restart_s: float | None = None
    """Time from a failure to the next step [s]; None: 600 s."""
    faults: str | None = None
    """Words of ``sim.faults.read_faults``, which price some days of the run; in place of the last
    four."""


def simulate(request: StepRequest) -> StepAnswer:
    """Price one step.

    Raises:
        SpecError: a name or a number of the request is wrong, or a setting would change nothing.
        ModelError: the config.json is not one, or describes a model that the decoder is not.
        LayoutError: degrees do not go with the cluster, the step or each other.
        DataError: the lengths cannot be read.

    Cost: some milliseconds for tens of micro-batches, a second for thousands.

    >>> answer = simulate(StepRequest("llama3-8b", "h100-sxm:8", "dp=8", 8192, 16))
    >>> answer.fits, [each.change for each in answer.would_fit or ()][:2]
    (False, ['zero=2', 'zero=3'])
    """
    request = plain_fields(request)
    _require_failures(request)
    asked = read_step(request)
    model, machine, layout = asked.model, asked.machine, asked.layout
    options, program = asked.options, asked.program
    documents = _documents_of(request, model, layout, options)
    price: Callable[[Layout, StepOptions], StepRun]
    price = partial(run_sites, model, machine, documents=documents)
    if request.layers is not None:
        program.require_own_layers()
        require_kernel_prices(model, machine.cluster, request.precision)
        require_no_offload(request.offload)
        layers = read_layers(request.layers, layout)
        price = partial(run_layered, model, machine, layers=layers, documents=documents)
    run = price(layout, options)
    jitter = goodput = would_fit = None
    step_s = run.price.step_s
    if request.jitter is not None:
        jitter = run_with_jitter(run.slowest, layout.dp, request.jitter, seed=request.seed)
        step_s *= jitter.mean
    if request.mtbf_hours is not None:
        goodput = _goodput(request, request.mtbf_hours, step_s, machine.cluster.devices)
    month = None if request.faults is None else _month(request, step_s, machine.cluster.devices)
    if not run.price.fits and request.layers is None:
        would_fit = fitting_changes(price, layout, options, machine.device)
    return StepAnswer(run, machine, options, jitter, goodput, would_fit, month, program)


@dataclass(frozen=True, slots=True, eq=False)
class AskedStep:
    """What the names and words of a request stand for."""

    model: ModelSpec
    machine: Machine
    layout: Layout
    options: StepOptions
    program: ProgramSpec


def read_step(request: StepRequest) -> AskedStep:
    """Read a request's names and words, and refuse what does not go together.

    Raises:
        SpecError: a name or a number of the request is wrong, or a setting would change nothing.
        ModelError: the config.json is not one, or describes a model that the decoder is not.
        LayoutError: degrees do not go with the cluster.
    """
    request = plain_fields(request)
    program = read_program(request.program)
    model, words = _model_of(request), _layout_of(request, program)
    require_used(request, experts=model.experts, cp=words.layout.cp)
    cluster = request.cluster
    machine = Machine(read_cluster(cluster) if isinstance(cluster, str) else cluster)
    layout = words.layout
    layout.require_world(machine.cluster.devices)
    program.require_device(machine.device)
    plain = step_options(request, words.virtual, machine, program)
    options = with_loads(plain, request, model, machine)
    require_modules(options.recompute, model)
    program.require(
        layout, options.schedule, options.recompute, options.context_strategy, options.precision
    )
    return AskedStep(model, machine, layout, options, program)


def step_options(
    request: StepRequest, virtual: int, machine: Machine, program: ProgramSpec
) -> StepOptions:
    """The request's options of a step on a cluster.

    Args:
        request: Its model, cluster, layout and documents are not read.
        virtual: Stages of each pipeline rank.
        machine: The cluster that computes.
        program: The program that trains.

    Raises:
        SpecError: names the setting.
    """
    request = plain_fields(request)
    _require_numbers(request, machine)
    schedule = request.schedule or ("interleaved" if virtual > 1 else "1f1b")
    known = [name for name, traits in SCHEDULES.items() if not traits.is_lossy]
    require_known("schedule", schedule, known)
    return StepOptions(
        request.context_tokens,
        request.step_sequences,
        micro_batch=request.micro_batch,
        virtual=virtual,
        schedule=schedule,
        recompute=read_recompute(request.recompute),
        offload=request.offload,
        precision=request.precision,
        expert_skew=request.expert_skew,
        policy=request.policy or "by-work",
        sharding=program.sharding,
        context_strategy=request.context_strategy or program.context_strategy,
        seed=request.seed,
        stack=program.stack,
        residuals=residuals_of(machine.device, program.stack),
    )


def require_used(request: StepRequest, *, experts: int, cp: int | None) -> None:
    """Refuse settings that would change nothing.

    Args:
        request: The step's.
        experts: Experts of the model, or 0.
        cp: Ranks that share the tokens of a micro-batch; None if that is searched.

    Raises:
        SpecError: names the setting, and what it needs.
    """
    if request.lengths is None and request.policy is not None:
        raise SpecError(
            f"policy = {request.policy} needs lengths, the documents that it packs. Give both or "
            f"neither."
        )
    if request.context_strategy not in (None, "needed-kv") and cp == 1:
        raise SpecError(
            f"context_strategy = {request.context_strategy} needs context ranks; cp = 1. Give cp "
            f"of 2 or more, or leave context_strategy out."
        )
    require_loads(request, experts=experts)


def _model_of(request: StepRequest) -> ModelSpec:
    return read_model(request.model) if isinstance(request.model, str) else request.model


def _layout_of(request: StepRequest, program: ProgramSpec) -> LayoutWords:
    if request.order is not None:
        require_known("order", request.order, tuple(ORDERS))
    order: str | None = request.order
    if not isinstance(request.layout, str):
        words = LayoutWords(request.layout, request.virtual)
    elif request.virtual == 1:
        words, order = read_layout(request.layout), order or program.order
    else:
        raise SpecError(
            f"virtual = {request.virtual} goes beside a Layout. Write it into the words: "
            f"{request.layout},virtual={request.virtual}."
        )
    if order is None:
        return words
    return dataclasses.replace(words, layout=dataclasses.replace(words.layout, order=ORDERS[order]))


def _documents_of(
    request: StepRequest, model: ModelSpec, layout: Layout, options: StepOptions
) -> Documents | DividedStep | None:
    """Micro-batches of documents; None for full windows."""
    if request.documents is None:
        if request.lengths is None:
            return None
        return step_packer(model, request.lengths, options)(layout, options)
    if request.lengths is not None:
        raise SpecError(
            "documents are packed already, and lengths are still to be packed. Give one of them."
        )
    require_documents(request.documents)
    if len(request.documents) not in (1, layout.dp):
        raise LayoutError(
            f"documents has micro-batches of {len(request.documents)} ranks for dp = {layout.dp}. "
            f"Give a row for each data-parallel rank, or one that stands for all."
        )
    return request.documents


def _require_numbers(request: StepRequest, machine: Machine) -> None:
    for name, most in (
        ("context_tokens", MOST_TOKENS),
        ("step_sequences", _MOST_SEQUENCES),
        ("micro_batch", _MOST_SEQUENCES),
        ("virtual", _MOST_SEQUENCES),
    ):
        if not 1 <= (value := getattr(request, name) or 0) <= most:
            raise SpecError(f"{name} is {value}. Give a whole number of 1 to {most:,}.")
    if request.seed < 0:
        raise SpecError(f"seed is {request.seed}. Give a whole number of 0 or more.")
    if not 1 <= request.expert_skew <= _MOST_SKEW:
        raise SpecError(
            f"expert_skew is {request.expert_skew:g}. Give the rows of the expert rank that has "
            f"most over the mean: 1 is balanced, and {_MOST_SKEW:,} the most."
        )
    require_known("offload", request.offload, OFFLOADS)
    require_known("precision", request.precision, get_args(Precision))
    if request.context_strategy is not None:
        require_known("context_strategy", request.context_strategy, CONTEXT_STRATEGIES)
    machine.require_precision(request.precision)


def require_known(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse a name that is not known.

    Raises:
        SpecError: names the setting, all that is known and the nearest.
    """
    if value not in known:
        raise SpecError(
            f'{name}: "{value}" is not one of {", ".join(known)}. Nearest: '
            f'"{nearest(str(value), known)}".'
        )


def _require_failures(request: StepRequest) -> None:
    """Refuse settings of failures where nothing fails."""
    for name in ("checkpoint_s", "checkpoint_steps", "restart_s"):
        value = getattr(request, name)
        if value is not None and request.mtbf_hours is None:
            raise SpecError(
                f"{name} = {value:g} needs mtbf_hours, for without it nothing fails. Give both or "
                f"neither."
            )
    if request.faults is not None and request.mtbf_hours is not None:
        raise SpecError(
            "faults and mtbf_hours both say how often devices fail. Give one of them; faults also "
            "takes detect, spares, repair and days."
        )


def _month(request: StepRequest, step_s: float, devices: int) -> Month:
    """Some days of a run with failures."""
    faults, days = read_faults(request.faults or "")
    return price_days(step_s, devices, faults, days=days, seed=request.seed)


def _goodput(request: StepRequest, mtbf_hours: float, step_s: float, devices: int) -> FaultRun:
    """A long run with failures."""
    checkpoint_s, restart_s = (
        usual if given is None else given
        for given, usual in ((request.checkpoint_s, _CHECKPOINT_S), (request.restart_s, _RESTART_S))
    )
    faults = FaultOptions(mtbf_hours * 3600, checkpoint_s, restart_s, request.checkpoint_steps)
    return run_with_faults(step_s, devices, faults, steps=_FAULT_STEPS, seed=request.seed)
