"""From words to a plan: what is read, what is searched, what is written down of it."""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from equipoise import __version__
from equipoise.balance.packing.turns import DIVIDES, TOGETHER, require_policy
from equipoise.base.digest import digest, digest_file
from equipoise.base.errors import SpecError
from equipoise.base.units import GIB
from equipoise.cli.simulate.judge import judge_idle
from equipoise.cli.simulate.setting import (
    require_kernel_prices,
    require_no_offload,
    step_options,
    step_packer,
)
from equipoise.cli.simulate.table import step_row
from equipoise.cost.curves.sources import sources_of
from equipoise.cost.offload import require_host
from equipoise.plan.answer.explain import find_flip, find_walls, loses_by
from equipoise.plan.answer.final import Finalist, price_choice, price_finalists, with_layers
from equipoise.plan.answer.run_steps import POLICIES
from equipoise.plan.export.program import Program
from equipoise.plan.export.settings import EXPORTS
from equipoise.plan.layers.words import say_layers
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.heuristics import RECIPES
from equipoise.plan.search.incumbent import Outcome, Progress
from equipoise.plan.search.mixed import ClassSearch
from equipoise.plan.search.offload import search_offloaded
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import list_space
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.device.spec import THIS_CPU
from equipoise.spec.offload import OFFLOADS, Offload
from equipoise.spec.plan import Candidate, Plan, Wall
from equipoise.spec.run.spec import Policy
from equipoise.spec.words import LAYOUT_WORDS, read_model, read_words
from equipoise.spec.workload import distribution_names

_ASKED = (
    "model",
    "cluster",
    "context_tokens",
    "step_sequences",
    "layout",
    "micro_batch",
    "recompute",
    "offload",
    "precision",
    "schedule",
    "context_strategy",
    "order",
    "layers",
    "export",
    "expert_skew",
    "lengths",
    "policy",
    "seed",
)
"""Flags that say what is planned."""

_SEARCHED: tuple[Policy, ...] = ("divided", "divided-in-time", "gangs", "bytescale")
"""Policies that divide documents, all but flexsp: it packs one step for a minute."""

_DEFAULTS = {
    "layers": "alike",
    "precision": "bf16",
    "expert_skew": 1.0,
    "policy": "by-work",
    "seed": 0,
}

_LIST_SHARE = 0.25
"""The share of the time for listing every choice."""
_LIST_S = 1.0
"""That it may take however little time there is."""


class Inputs(Protocol):
    """Everything that a plan depends on: of a cluster, or of a run."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def asked(self) -> dict[str, str]:
        """Words of the command line."""

    @property
    def read(self) -> dict[str, str]:
        """Digests of what was read, by name."""

    @property
    def search(self) -> Search:
        """What is searched."""

    @property
    def is_whole(self) -> bool:
        """Whether every choice is searched; there may be no time to list them."""

    @property
    def last_resort(self) -> Offload:
        """What may be offloaded where nothing fits without."""

    def go_on(
        self, outcome: Outcome, *, seconds: float, watch: Callable[[Progress], None]
    ) -> Outcome:
        """Search with offloading, too, where that is asked for or nothing fits without."""

    def finalists(self, outcome: Outcome, due: Deadline) -> list[Finalist]:
        """The best and the next, fastest first, as far as there is time."""

    def words(self, choice: Choice) -> tuple[dict[str, str], dict[str, int | str]]:
        """Flags of ``equipoise simulate``, and keys of run.toml."""

    def walls(self, best: Finalist, due: Deadline) -> tuple[Wall, ...]:
        """What no longer fits when it grows; none if there is no time to price it."""


def digest_inputs(inputs: Inputs) -> str:
    """Of all that a plan depends on."""
    return digest({"asked": inputs.asked, "read": inputs.read})


@dataclass(frozen=True, slots=True, eq=False)
class ClusterInputs:
    """A model on a described cluster."""

    name: str
    lengths: str | None
    policies: tuple[Policy, ...]
    """Those that are searched; none where one is given, or nothing is packed."""
    by_layer: bool
    """Whether layers may have strategies of their own."""
    offload: str | None
    """As it was asked for: a setting, ``any``, or None."""
    program: Program | None
    """For which the choices are, where they are for another."""
    asked: dict[str, str]
    read: dict[str, str]
    search: Search
    is_whole: bool

    @property
    def last_resort(self) -> Offload:
        """All that is not excluded; where layers differ or compute in host memory, nothing."""
        is_here = self.by_layer or self.search.machine.device.name == THIS_CPU
        if is_here or (self.program is not None and "both" not in self.program.known["offload"]):
            return "none"
        return next((each for each in OFFLOADS if each == self.offload), "both")

    def go_on(
        self, outcome: Outcome, *, seconds: float, watch: Callable[[Progress], None]
    ) -> Outcome:
        """Search with offloading, too, where that is asked for or nothing fits without."""
        nothing_fits = not outcome.fitting and outcome.progress.bound_s == float("inf")
        is_open = self.offload == "any" or (self.offload is None and nothing_fits)
        if not is_open or self.last_resort == "none":
            return outcome
        may = None if self.program is None else partial(self.program.can, self.search.model)
        return search_offloaded(self.search, outcome, seconds=seconds, watch=watch, may=may)

    def finalists(self, outcome: Outcome, due: Deadline) -> list[Finalist]:
        """The best and the next, priced whole."""
        found = price_finalists(self.search, outcome, due=due)
        return with_layers(self.search, outcome, found, due) if self.by_layer else found

    def words(self, choice: Choice) -> tuple[dict[str, str], dict[str, int | str]]:
        """Flags, the packing policy among them where it was searched, and no keys."""
        packed = {} if self.lengths is None else {"lengths": self.lengths}
        packed |= {"policy": choice.options.policy} if self.policies else {}
        return choice.words() | packed, {}

    def walls(self, best: Finalist, due: Deadline) -> tuple[Wall, ...]:
        """Of window, micro-batch and layers; of layers that differ, none."""
        if best.layers:
            return ()
        search = self.search
        return due.attempt(partial(find_walls, search.model, search.machine, best.choice)) or ()


def read_inputs(args: argparse.Namespace, due: Deadline) -> ClusterInputs:
    """Read model, cluster and lengths, and list the space; of a vast one, its recipes.

    Raises:
        SpecError: a word is wrong, or nothing is left to choose.
    """
    model, cluster = read_model(args.model), read_cluster(args.cluster)
    by_layer = args.layers == "own"
    if by_layer and args.export is not None:
        raise SpecError(
            f"--layers own plans layers that differ, and --export {args.export} has one setting "
            f"for all. Export a plan of --layers alike."
        )
    if by_layer:
        require_no_offload(args)
        require_kernel_prices(model, cluster, args.precision)
    fixed: dict[str, int | str] = {}
    if args.layout is not None:
        fixed |= read_words("--layout", args.layout, LAYOUT_WORDS)
    for name in ("micro_batch", "recompute", "offload", "schedule", "context_strategy", "order"):
        if getattr(args, name) not in (None, "any"):
            fixed[name] = getattr(args, name)
    judge_idle(args, experts=model.experts, cp=cast("int | None", fixed.get("cp")))
    is_plain = not by_layer and args.export is None and len(cluster.classes) == 1
    is_plain &= cluster.classes[0].device.name != THIS_CPU
    policies = _searched(args, is_plain=is_plain, fixed=fixed)
    whole = argparse.Namespace(**vars(args))
    whole.micro_batch = args.micro_batch or 1
    whole.recompute = args.recompute or "none"
    whole.offload = fixed.get("offload", "none")
    whole.context_strategy = args.context_strategy or "needed-kv"
    whole.policy = None if policies else args.policy
    machine = Machine(cluster)
    base = step_options(whole, 1, machine.device)
    base.require()
    if args.offload is not None:
        require_host(machine.device, args.offload)
    program = None if args.export is None else EXPORTS[args.export][0]
    if program is not None:
        stack = dataclasses.replace(base.stack, offloads_master=program.offloads_master)
        base = dataclasses.replace(base, stack=stack)
    pack = step_packer(args, base)
    some = partial(list_space, model, cluster.devices, base, fixed=fixed, policies=policies)
    listing = due.part(_LIST_SHARE)
    listing = dataclasses.replace(listing, until_s=max(listing.until_s, listing.clock() + _LIST_S))
    every = listing.attempt(some)
    space = some(only=RECIPES) if every is None else every
    if program is not None:
        space = program.keep(model, space)

    packer = None if pack is None else lambda choice: pack(choice.layout, choice.options)
    kind = Search if len(cluster.classes) == 1 else ClassSearch
    search = kind(model, machine, space, packer=packer)
    asked = {
        name.replace("_", "-"): str(getattr(args, name))
        for name in _ASKED
        if getattr(args, name) is not None and getattr(args, name) != _DEFAULTS.get(name)
    }
    read = read_digests(args.model, args.cluster, args.lengths)
    return ClusterInputs(
        *(args.model, args.lengths, policies, by_layer, args.offload, program),
        *(asked, read, search, every is not None),
    )


def _searched(
    args: argparse.Namespace, *, is_plain: bool, fixed: dict[str, int | str]
) -> tuple[Policy, ...]:
    """The policies that are searched; none where one is given.

    Args:
        args: The policy, and what it is searched for.
        is_plain: Whether all layers, and all devices, are alike and known from kernels: only so are
            divided documents priced.
        fixed: Degrees that are given.

    Raises:
        SpecError: layouts cannot be compared under the policy.
        LayoutError: no rank of such a layout runs the policy.
    """
    if args.policy == "any":
        return (*POLICIES, *_SEARCHED) if is_plain else POLICIES
    if args.policy == "delayed":
        raise SpecError(
            "--policy delayed packs other documents for every layout, so their steps are not to be "
            "compared. Plan with --policy by-work, and price its layout under delayed with "
            "equipoise simulate."
        )
    if args.policy in DIVIDES and not is_plain:
        raise SpecError(
            f"--policy {args.policy} divides documents, which is priced on a cluster of one class, "
            f"with all layers alike, and not with --export or on this machine. Take --policy "
            f"by-work."
        )
    if args.policy is not None:
        cp, pp = (cast("int | None", fixed.get(name)) for name in ("cp", "pp"))
        stages = pp or (1 if args.policy in TOGETHER else 2)
        require_policy(args.policy, context=cp or 1, pipeline=stages)
    return ()


def read_digests(model: str, cluster: str, lengths: str | None) -> dict[str, str]:
    """Digests of what a plan of these words reads today."""
    known = read_cluster(cluster)
    found = {
        "model": digest(read_model(model)),
        "cluster": digest(known),
        "curves": digest_curves(known),
        "equipoise": __version__,
    }
    if lengths is not None:
        is_known = lengths in distribution_names()
        found["lengths"] = lengths if is_known else digest_file(Path(lengths))
    return found


def digest_curves(cluster: ClusterSpec) -> str:
    """Of the shipped curves, and of those that were measured on a cluster's own machine."""
    from equipoise import cost

    shipped = sorted(Path(cost.__file__).with_name("data").iterdir())
    own = [each.device.curve_file for each in cluster.classes]
    return digest([digest_file(file) for file in (*shipped, *own) if file is not None])


def decide(inputs: Inputs, outcome: Outcome, finalists: list[Finalist], due: Deadline) -> Plan:
    """Say why the first is the first."""
    search = inputs.search
    best = finalists[0].run.price

    def candidate(each: Finalist) -> Candidate:
        words, keys = inputs.words(each.choice)
        words |= {"layers": say_layers(each.layers)} if each.layers else {}
        apart = {} if each is finalists[0] else loses_by(best.terms, each.run.price.terms)
        return Candidate(
            words, step_row(each.run, search.machine, each.choice.options), apart, keys
        )

    flip = None
    if len(finalists) > 1:
        second = finalists[1]
        flip = find_flip(best.terms, second.run.price.terms, second.choice.words()["layout"])
    bound = min(outcome.progress.bound_s, best.step_s) if inputs.is_whole else 0.0
    without = None
    if finalists[0].choice.options.offload != "none":
        choice = finalists[0].choice
        here = Choice(choice.layout, dataclasses.replace(choice.options, offload="none"))
        kept = due.attempt(partial(price_choice, search, here))
        if kept is not None:
            gib = float(kept.run.price.memory_bytes.max()) / GIB
            without = {"step_s": kept.run.price.step_s, "memory_gib_max": gib}
    return Plan(
        asked=inputs.asked,
        best=candidate(finalists[0]),
        runners_up=tuple(candidate(each) for each in finalists[1:]),
        bound_s=bound,
        gap=best.step_s / bound - 1.0 if bound > 0.0 else None,
        listed=outcome.listed,
        priced=outcome.progress.priced,
        wall=inputs.walls(finalists[0], due),
        flip=flip,
        nodes=finalists[0].nodes,
        read=inputs.read,
        sources=sources_of(search.machine.cluster, search.space.base.precision),
        without_offload=without,
    )
