"""A plan for a model on a described cluster: what is asked, what is read, which choices there are.

Kept true (tests/unit/cli/plan, tests/unit/plan/test_request.py)
    A lock's words under ``asked`` are read back as the same request; a refusal is one sentence.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, cast

from equipoise import __version__, cost
from equipoise.balance.packing.turns import require_policy
from equipoise.base.digest import digest, digest_file
from equipoise.base.errors import SpecError
from equipoise.cost.offload import require_host
from equipoise.cost.step.request import Precision, StepOptions, StepPrice
from equipoise.cost.step.spread import Interval, step_interval
from equipoise.plan.answer.across import across_remarks, step_of_sites
from equipoise.plan.answer.explain import find_walls
from equipoise.plan.answer.final import Finalist, price_finalists, with_layers
from equipoise.plan.answer.remarks import Published, price_published, remarks_of, with_published
from equipoise.plan.answer.run_steps import COMPARED
from equipoise.plan.export.program import Program
from equipoise.plan.export.settings import EXPORTS, program_of
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.incumbent import Outcome, SearchProgress
from equipoise.plan.search.kinds import make_search
from equipoise.plan.search.offload import search_offloaded
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.listing import list_runnable
from equipoise.plan.space.packs import Packer
from equipoise.sim.answer import calibration_doubts, program_sources
from equipoise.sim.drawn import step_packer
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.require import require_kernel_prices, require_no_offload
from equipoise.sim.request import (
    StepRequest,
    require_known,
    require_used,
    step_options,
)
from equipoise.sim.settle.experts import with_loads
from equipoise.spec.catalog import POLICIES, Policy
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.device.spec import THIS_CPU
from equipoise.spec.layout import ORDERS, Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.offload import OFFLOADS, Offload
from equipoise.spec.plan import Wall
from equipoise.spec.program.file import read_program
from equipoise.spec.program.spec import DEFAULT, ProgramSpec
from equipoise.spec.recompute import read_recompute, require_modules
from equipoise.spec.words import LAYOUT_WORDS, read_model, read_words
from equipoise.spec.workload import distribution_names, listed_lengths

_SEARCHED = tuple(name for name, traits in POLICIES.items() if traits.planned == "for any")

SECONDS = 30.0
"""A plan's budget unless one is given."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model to be planned on a described cluster.

    Names and words are those of ``equipoise plan``; what is None is searched.
    """

    model: str
    """A known model, ``layers=..,hidden=..,heads=..,vocab=..``, or the path of a config.json."""
    cluster: str
    """``h100-sxm:64``, or the path of a cluster.toml."""
    context_tokens: int
    """Window: tokens of a sequence."""
    step_sequences: int
    """Sequences of one step, over all ranks."""
    layout: str | None = None
    """Degrees that are fixed, as ``tp=8,zero=1``."""
    micro_batch: int | None = None
    recompute: str | None = None
    """A setting of whole layers, or modules of the program, as ``mla_up_proj+mlp``."""
    offload: Offload | Literal["any"] | None = None
    """None: nothing, unless nothing fits without; ``any`` searches all."""
    precision: Precision = "bf16"
    schedule: str | None = None
    context_strategy: str | None = None
    order: Literal["dp-pp", "pp-dp"] | None = None
    layers: Literal["alike", "own"] | None = None
    """``own`` lets each layer have its own degrees, where that is faster."""
    program: str = DEFAULT
    """The program that trains: a shipped one, or the path of a program.toml; what it cannot run is
    not searched."""
    export: str | None = None
    """A program whose settings alone are searched: torchtitan or megatron."""
    expert_skew: float = 1.0
    """Rows of the expert rank that has most, over the mean [ratio]."""
    expert_loads: str | None = None
    """What routers choose: ``W0`` to ``W7``, or a run's folder; instead of ``expert_skew``."""
    expert_policy: str = "fixed"
    expert_slots: int = 1
    """Most copies of experts that the policy makes on a rank."""
    lengths: str | None = None
    """Document lengths: a distribution, a file or a list, as in 3000,40,900; None: full windows."""
    policy: str | None = None
    """``pack.policy`` for ``lengths``; None: by-work; ``any`` searches."""
    seed: int = 0
    """Seed of the documents drawn."""
    seconds: float = SECONDS
    """The most to list, search and price."""
    out: Path | None = None
    """Folder that keeps what the search has priced; the same request goes on from it."""

    def asked(self) -> dict[str, str]:
        """The words of a command line that differ from its defaults, in the order of a lock."""
        plain = {"layers": "alike", "policy": "by-work", "seconds": self.seconds, "out": self.out}
        words = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value not in (None, each.default, plain.get(each.name)):
                words[each.name.replace("_", "-")] = str(value)
        return words


_ALIKE = """context_tokens step_sequences schedule precision context_strategy expert_skew
expert_loads expert_policy expert_slots lengths policy seed"""

_KNOWN = {
    "offload": (*OFFLOADS, "any"),
    "order": tuple(ORDERS),
    "layers": ("alike", "own"),
    "export": tuple(EXPORTS),
}


@dataclass(frozen=True, slots=True, eq=False)
class ClusterInputs:
    """A model on a described cluster."""

    request: PlanRequest
    policies: tuple[Policy, ...]
    """Those that are searched; none where one is given, or nothing is packed."""
    program: Program | None
    """The program whose settings the choices are, if any."""
    asked: dict[str, str]
    read: dict[str, str]
    search: Search
    unlisted_s: float
    """Lower bound of choices that the search does not have; infinite where it has all [s]."""
    trains: ProgramSpec
    lattice: Lattice
    """Every choice."""
    published: Published = field(default_factory=list)
    """Recipes of the model, priced when the search has ended."""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.request.model

    @property
    def sources(self) -> dict[str, str]:
        """Where each number of the cluster and of the program comes from."""
        return program_sources(self.search.machine.cluster, self.search.space.base, self.trains)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What was measured under load, or only in part, where the cluster is this machine."""
        return calibration_doubts(self.search.machine.cluster)

    def interval(self, price: StepPrice) -> Interval | None:
        """Where 80% of such steps lie; None on this machine, whose layouts nobody timed."""
        return None if self.search.machine.device.is_here else step_interval(price.terms)

    @property
    def has_sites(self) -> bool:
        """Whether what several sites could do alone is priced."""
        return len(self.search.machine.cluster.classes) > 1 and self.search.packer is None

    @property
    def by_layer(self) -> bool:
        """Whether layers may have strategies of their own."""
        return self.request.layers == "own"

    @property
    def last_resort(self) -> Offload:
        """All that is not excluded; where layers differ or compute in host memory, nothing."""
        is_here = self.by_layer or self.search.machine.device.name == THIS_CPU
        if is_here or (self.program is not None and "both" not in self.program.known["offload"]):
            return "none"
        return next((each for each in OFFLOADS if each == self.request.offload), "both")

    def go_on(
        self, outcome: Outcome, *, seconds: float, watch: Callable[[SearchProgress], None]
    ) -> Outcome:
        """Search with offloading, too, where that is asked for or nothing fits without."""
        offload = self.request.offload
        nothing_fits = not outcome.fitting and outcome.progress.bound_s == float("inf")
        is_open = offload == "any" or (offload is None and nothing_fits)
        if not is_open or self.last_resort == "none":
            return outcome
        may = None if self.program is None else partial(self.program.can, self.search.model)
        return search_offloaded(self.search, outcome, seconds=seconds, watch=watch, may=may)

    def finalists(self, outcome: Outcome, due: Deadline) -> list[Finalist]:
        """The best and the next, priced whole."""
        finalists = price_finalists(self.search, outcome, due=due)
        if self.search.packer is None and self.program is None:
            of_all = self.search, self.lattice, self.request.model, due
            self.published.extend(price_published(*of_all))
            finalists = with_published(finalists, self.published)
        return with_layers(self.search, outcome, finalists, due) if self.by_layer else finalists

    def words(self, choice: Choice) -> tuple[dict[str, str], dict[str, int | str]]:
        """Flags, the packing policy among them where it was searched, and no keys."""
        lengths = self.request.lengths
        packed = {} if lengths is None else {"lengths": lengths}
        packed |= {"policy": choice.options.policy} if self.policies else {}
        if self.request.program != DEFAULT:
            # Its own order need not be the one of a layout's words.
            named = next(name for name, axes in ORDERS.items() if axes == choice.layout.order)
            packed |= {"order": named, "program": self.request.program}
        return choice.words() | packed, {}

    def remarks(self, finalists: list[Finalist], due: Deadline) -> tuple[str, ...]:
        """Published recipes at this step, and who runs the best's schedule."""
        of_all = self.search, self.lattice, self.published, finalists
        said = remarks_of(*of_all, named=self.request.program != DEFAULT)
        if not self.has_sites:
            return said
        search, base, best_s = self.search, self.search.space.base, finalists[0].run.price.step_s
        sizes = search.machine.cluster, base.step_sequences, search.model.params
        step = step_of_sites(*sizes, self._search_site, due)
        return (*said, *across_remarks(step, best_s, base.stack.grad_bytes))

    def _search_site(self, site: ClusterSpec, sequences: int) -> Search:
        """One site's devices with its share of the sequences."""
        base = dataclasses.replace(self.search.space.base, step_sequences=sequences)
        model, given = self.search.model, _fixed(self.request)
        lattice = list_runnable(self.trains, model, site.devices, base, fixed=given)
        return make_search(model, Machine(site), lattice, self.request.model)[0]

    def walls(self, best: Finalist, due: Deadline) -> tuple[Wall, ...]:
        """The walls of window, micro-batch and layers; none where layers differ."""
        if best.layers:
            return ()
        search = self.search
        return due.attempt(partial(find_walls, search.model, search.machine, best.choice)) or ()


def read_inputs(request: PlanRequest) -> ClusterInputs:
    """Read model, cluster and lengths, and list the space unless it is vast.

    Raises:
        SpecError: a word is wrong, or nothing is left to choose.
    """
    for name, known in _KNOWN.items():
        if getattr(request, name) is not None:
            require_known(name, getattr(request, name), known)
    model, cluster = read_model(request.model), read_cluster(request.cluster)
    trains = read_program(request.program)
    by_layer = request.layers == "own"
    if by_layer and request.export is not None:
        raise SpecError(
            f"layers = own plans layers that differ, and export = {request.export} has one setting "
            f"for all. Export a plan of layers = alike."
        )
    if by_layer:
        trains.require_own_layers()
        require_no_offload(request.offload)
        require_kernel_prices(model, cluster, request.precision)
    fixed = _fixed(request)
    step = StepRequest(
        *(request.model, request.cluster, Layout()),
        micro_batch=1 if request.micro_batch is None else request.micro_batch,
        recompute=str(fixed.get("recompute", "none")),
        offload=cast(Offload, fixed.get("offload", "none")),
        program=trains,
        **{name: getattr(request, name) for name in _ALIKE.split()},
    )
    require_used(step, experts=model.experts, cp=cast("int | None", fixed.get("cp")))
    is_plain = not by_layer and request.export is None and len(cluster.classes) == 1
    is_plain &= not cluster.classes[0].device.is_here
    policies = _searched(request, is_plain=is_plain, fixed=fixed)
    machine = Machine(cluster)
    if policies:
        step = dataclasses.replace(step, policy=None)
    trains.require_device(machine.device)
    trains.require_modules(step.recompute)
    trains.require_given(fixed, request.precision)
    require_modules(step.recompute, model)
    base = step_options(step, 1, machine, trains)
    base = with_loads(base, step, model, machine)
    if request.offload is not None:
        require_host(machine.device, request.offload)
    program = None if request.export is None else program_of(request.export, request.model)
    if program is not None:
        stack = dataclasses.replace(base.stack, offloads_master=program.offloads_master)
        base = dataclasses.replace(base, stack=stack)
    packer = None if request.lengths is None else choice_packer(model, request.lengths, base)
    lattice = list_runnable(trains, model, cluster.devices, base, fixed=fixed, policies=policies)
    search, unlisted_s = make_search(
        model, machine, lattice, request.model, packer=packer, program=program, by_layer=by_layer
    )
    asked = request.asked()
    rest = asked, read_digests(asked), search, unlisted_s, trains, lattice
    return ClusterInputs(request, policies, program, *rest)


def choice_packer(model: ModelSpec, lengths: str, base: StepOptions) -> Packer:
    """A function that packs one step's documents for any choice.

    Args:
        model: What a document's work is counted for.
        lengths: A distribution's name, or a file of lengths.
        base: Window, sequences, policy and seed, which no choice changes.
    """
    pack = step_packer(model, lengths, base)
    return lambda choice: pack(choice.layout, choice.options)


def _fixed(request: PlanRequest) -> dict[str, int | str]:
    """What is not to be searched, by its name in the space."""
    fixed: dict[str, int | str] = {}
    if request.layout is not None:
        fixed |= read_words("layout", request.layout, LAYOUT_WORDS)
    if request.recompute is not None:
        fixed["recompute"] = read_recompute(request.recompute)
    for name in ("micro_batch", "offload", "schedule", "context_strategy", "order"):
        if getattr(request, name) not in (None, "any"):
            fixed[name] = getattr(request, name)
    return fixed


def _searched(
    request: PlanRequest, *, is_plain: bool, fixed: dict[str, int | str]
) -> tuple[Policy, ...]:
    """The policies that are searched; none where one is given.

    Args:
        request: The policy, and what it is searched for.
        is_plain: Whether all layers, and all devices, are alike and known from kernels: only so are
            divided documents priced.
        fixed: Degrees that are given.

    Raises:
        SpecError: layouts cannot be compared under the policy.
    """
    policy = request.policy
    if policy == "any":
        return (*COMPARED, *_SEARCHED) if is_plain else COMPARED
    traits = None if policy is None else POLICIES.get(policy)
    if traits is not None and traits.lets_wait:
        raise SpecError(
            f"policy = {policy} packs other documents for every layout, so their steps cannot be "
            f"compared. Plan with policy = by-work, and price its layout under {policy} with "
            f"equipoise simulate."
        )
    if traits is not None and traits.divides and not is_plain:
        raise SpecError(
            f"policy = {policy} divides documents, which is priced on a cluster of one class, with "
            f"all layers alike, and not with export or on this machine. Take policy = by-work."
        )
    if policy is not None and traits is not None:
        cp, pp = (cast("int | None", fixed.get(name)) for name in ("cp", "pp"))
        stages = pp or (1 if traits.runs_together else 2)
        require_policy(policy, context=cp or 1, pipeline=stages)
    return ()


def read_digests(asked: Mapping[str, str]) -> dict[str, str]:
    """Digests of what a plan of these words reads today."""
    known, lengths = read_cluster(asked["cluster"]), asked.get("lengths")
    digests = {
        "model": digest(read_model(asked["model"])),
        "cluster": digest(known),
        "curves": digest_curves(known),
        "equipoise": __version__,
    }
    if "program" in asked:
        digests["program"] = digest(read_program(asked["program"]))
    if lengths is not None:
        is_known = lengths in distribution_names() or listed_lengths(lengths) is not None
        digests["lengths"] = lengths if is_known else digest_file(Path(lengths))
    return digests


def digest_curves(cluster: ClusterSpec) -> str:
    """The digest of the shipped curves, and of those measured on a cluster's own machine."""
    data = Path(cost.__file__).with_name("data")
    shipped = sorted(file for file in data.iterdir() if file.is_file())
    if not any(each.device.is_here for each in cluster.classes):
        shipped += sorted((data / "accelerators").iterdir())
    own = [each.device.curve_file for each in cluster.classes]
    return digest([digest_file(file) for file in (*shipped, *own) if file is not None])
