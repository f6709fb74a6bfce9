"""A plan for a run.toml on this machine, and a run that obeys it.

What it decides
    What is read: the run's model, its packing keys, the lengths of its own corpus, this machine as
    ``equipoise calibrate`` measured it: its CUDA devices, or its cores if it has none. Each has a
    digest by a name that a user knows. Keys that a plan decides are not among them: one that was
    given stands in the plan, or contradicts it.

Kept true (tests/unit/cli/plan/test_run.py, tests/multi/plan/test_plan_train.py)
    A lock is refused when any of it changed, and obeyed when none did.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise import __version__
from equipoise.base.digest import digest
from equipoise.base.errors import LayoutError, PlanError
from equipoise.cost.step.request import StepOptions, StepPrice, residuals_of
from equipoise.cost.step.spread import Interval, own_interval
from equipoise.data.modality.rules import ItemRules
from equipoise.data.progress import Progress, SilentProgress
from equipoise.observe.machine import own_ranks
from equipoise.plan.answer.final import Finalist
from equipoise.plan.answer.run_encoders import RunEncoders
from equipoise.plan.answer.run_price import find_window_wall, packer_of, price_run
from equipoise.plan.answer.run_stages import require_stages
from equipoise.plan.answer.run_steps import RunSteps, policies_of
from equipoise.plan.described import SECONDS, digest_curves
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.incumbent import Outcome
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.trainable import keep_timed, list_trainable, run_keys
from equipoise.sim.answer import calibration_doubts, program_sources
from equipoise.sim.machine import Machine
from equipoise.spec.catalog import Policy
from equipoise.spec.cluster.spec import ClusterSpec, this_machine
from equipoise.spec.device.by_name import THIS_CPU, own_name
from equipoise.spec.device.here import device_file
from equipoise.spec.modality.trained import run_shares
from equipoise.spec.offload import Offload
from equipoise.spec.plan import RUN_TOML, Plan, Wall, read_plan, require_fresh
from equipoise.spec.run.load import read_run
from equipoise.spec.run.obey import is_given, obey
from equipoise.spec.run.resolve import ResolvedRun

_EVERY = -math.inf
"""No choice is left out while time lasts: there are some hundred, and bounds hold for kernels,
which a step's own parts, where they were timed here, may undercut."""

if TYPE_CHECKING:
    from equipoise.data.cache.store import TokenStore


@dataclass(frozen=True, slots=True, eq=False)
class RunPlanRequest:
    """A run to be planned on this machine; a key that it gives is not searched."""

    run: ResolvedRun
    file: Path
    """The run.toml that the run was read from."""
    keys: tuple[tuple[str, str], ...] = ()
    """Dotted keys, and their text, that were given beside the file."""
    ranks: int | None = None
    """None: what the run's layout says, else a core or a device each."""
    seconds: float = SECONDS
    """The most to search and price; the time that a corpus takes is not counted."""
    out: Path | None = None
    """Folder that keeps what the search has priced; the same request goes on from it."""

    @classmethod
    def read(
        cls, file: str | Path, keys: Mapping[str, object] | None = None, **more: Any
    ) -> "RunPlanRequest":
        """The request for a run.toml.

        Args:
            file: The run.toml.
            keys: Dotted keys that replace the file's, as ``{"layout.tp": 2}``.
            more: Other fields.

        Raises:
            SpecError: every fault of the file and of the keys.
        """
        given = tuple((name, str(value)) for name, value in (keys or {}).items())
        return cls(read_run(Path(file), list(given)), Path(file), given, **more)

    def asked(self, ranks: int) -> dict[str, str]:
        """The words of a command line, in the order of a lock."""
        return {RUN_TOML: str(self.file), "ranks": str(ranks), **dict(self.keys)}


@dataclass(frozen=True, slots=True, eq=False)
class RunInputs:
    """A run on this machine's cores or devices."""

    run: ResolvedRun
    asked: dict[str, str]
    read: dict[str, str]
    search: Search
    steps: RunSteps
    policies: tuple[Policy, ...]
    doubt: str
    """A sentence on prices that were not measured; empty where all were."""
    is_timed: bool
    """Whether the parts of the run's steps were timed here."""
    encoders: RunEncoders | None = None
    """What encodes images and sound, if the run has any."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.spec.name

    @property
    def sources(self) -> dict[str, str]:
        """Where each number of this machine comes from."""
        return program_sources(self.search.machine.cluster, self.search.space.base, None)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What was measured of this machine under load, or only in part."""
        return calibration_doubts(self.search.machine.cluster)

    def interval(self, price: StepPrice) -> Interval | None:
        """Where 80% of such steps lie; None where something was not timed, or is not trained."""
        is_whole = self.is_timed and (self.encoders is None or self.encoders.is_timed)
        is_whole = is_whole and not self.run.spec.train.freeze
        return own_interval(price.step_s) if is_whole else None

    def beside_s(self, best: Finalist) -> float:
        """What every choice takes beside its decoder: encoders, without what the layout decides."""
        return 0.0 if self.encoders is None else self.encoders.price(best.choice).least_s

    def remarks(self, _finalists: list[Finalist], _due: Deadline) -> tuple[str, ...]:
        """None: the run's program is equipoise, and its model its own."""
        return ()

    @property
    def unlisted_s(self) -> float:
        """Infinite: there are some hundred choices, and all are listed."""
        return math.inf

    @property
    def last_resort(self) -> Offload:
        """Nothing: ``train`` keeps all on the device, which here is the host."""
        return "none"

    def go_on(self, outcome: Outcome, **_: object) -> Outcome:
        """As it is."""
        return outcome

    def finalists(self, outcome: Outcome, due: Deadline) -> list[Finalist]:
        """The best and the next under every policy, with the memory of this package's ranks."""
        return price_run(
            self.search,
            outcome,
            self.steps,
            policies=self.policies,
            precision=self.run.spec.train.precision,
            encoders=self.encoders,
            due=due,
        )

    def words(self, choice: Choice) -> tuple[dict[str, str], dict[str, int | str]]:
        """Flags, the packing policy among them, and keys of run.toml."""
        policy = choice.options.policy
        return choice.words() | {"policy": policy}, run_keys(choice)

    def walls(self, best: Finalist, due: Deadline) -> tuple[Wall, ...]:
        """The wall that a longer window hits: a forecast, which takes no time."""
        del due
        policy = best.choice.options.policy
        tokens = self.steps.most_tokens(policy, best.choice.layout)
        return find_window_wall(self.search.model, best, tokens, self.run.spec.train.precision)


def ranks_of(request: RunPlanRequest, what: str) -> int:
    """The ranks of a run that is planned on this machine, one a core or a device.

    Args:
        request: The run.
        what: Subject and verb of the refusal, as "A plan prices".

    Raises:
        LayoutError: more ranks than cores or devices.
    """
    most, ranks = own_ranks(), request.ranks
    ranks = request.run.spec.layout.count_ranks(most) if ranks is None else ranks
    if not 1 <= ranks <= most:
        unit = "core" if own_name() == THIS_CPU else "device"
        raise LayoutError(
            f"{what} one rank a {unit}: ranks must be 1 to {most} on this machine, not {ranks}."
        )
    return ranks


def read_run_inputs(request: RunPlanRequest, *, progress: Progress | None = None) -> RunInputs:
    """Read the run's corpus and this machine, and list what the run could do.

    Args:
        request: The run.
        progress: Shown while a corpus is made.

    Raises:
        SpecError: nothing is left to choose, or the devices were never measured.
        LayoutError: more ranks than cores or devices.
        DataError: there is no corpus.
    """
    run, ranks = request.run, ranks_of(request, "A plan prices")
    policies = policies_of(run.spec.pack.policy, is_given=is_given(run, "pack.policy"))
    store = open_corpus(run, progress)
    cluster = this_machine(ranks)
    machine = Machine(cluster)
    steps = RunSteps(run.spec, run.model, store.doc_tokens, store.mixture)
    base = run_options(run, machine, policies[0])
    space = list_trainable(
        run, ranks, base, count_batches=lambda dp: steps.count_batches(policies[0], dp)
    )
    timed = keep_timed(run, machine, space)
    search = Search(
        *(run.model, machine, timed if len(timed) else space),
        packer_of(steps, policies[0]),
        gap=_EVERY,
    )
    read = digest_run(run, store, cluster)
    encoders = run_encoders(run, store, machine, steps)
    doubt = _doubt(request, machine, encoders, timed=len(timed), listed=len(space))
    return RunInputs(
        run,
        request.asked(ranks),
        read,
        search,
        steps,
        policies,
        doubt,
        is_timed=len(timed) > 0,
        encoders=encoders,
    )


def run_encoders(
    run: ResolvedRun, store: "TokenStore", machine: Machine, steps: RunSteps
) -> RunEncoders | None:
    """What encodes the run's images and sound; None if it has none."""
    specs = run.spec.encoders
    if not specs:
        return None
    return RunEncoders(specs, store.require_items(), store.documents, run.model, machine, steps)


def open_corpus(run: ResolvedRun, progress: Progress | None = None) -> "TokenStore":
    """The run's tokens; they are made where there are none yet.

    Raises:
        ModelError: its tokenizer has more tokens than the model.
    """
    from equipoise.data.cache.store import check_vocabulary, prepare  # a tokenizer is an extra

    rules = ItemRules.of(run.spec)
    store = prepare(run.spec.data, run.base, progress=progress or SilentProgress(), rules=rules)
    check_vocabulary(store, run.model.vocab)
    return store


def run_options(run: ResolvedRun, machine: Machine, policy: Policy) -> StepOptions:
    """What the run says of a step that is not to be chosen."""
    pack = run.spec.pack
    return StepOptions(
        pack.context_tokens,
        pack.step_tokens // pack.context_tokens,
        precision=run.spec.train.precision,
        policy=policy,
        sharding=run.spec.layout.sharding,
        seed=run.spec.train.seed,
        residuals=residuals_of(machine.device),
        trained=run_shares(run.spec, run.model),
    )


def digest_run(run: ResolvedRun, store: "TokenStore", cluster: ClusterSpec) -> dict[str, str]:
    """Digests of what a plan of this run reads today."""
    spec = run.spec
    pack = dataclasses.asdict(spec.pack)
    del pack["policy"]
    layout = spec.layout
    lengths = store.doc_tokens if store.mixture is None else [store.doc_tokens, store.mixture]
    some = {}
    if spec.encoders:
        items, sizes = store.require_items(), [each.sizes for each in spec.encoders]
        some["images and sound"] = digest([sizes, items.begin, items.rows, items.kind, items.grid])
    if spec.train.freeze:
        some["frozen weights"] = digest(spec.train.freeze)
    return some | {
        "model": digest(run.model),
        "lengths": digest(lengths),
        "packing": digest([pack, spec.train.seed, layout.sharding, layout.ranks_per_node]),
        "precision": digest(spec.train.precision),
        "machine": digest([cluster.device.title, cluster.devices]),
        "curves": digest_curves(cluster),
        "equipoise": __version__,
    }


def guess_sentence(cluster: ClusterSpec) -> str:
    """What to say of a machine that was not measured; nothing of one that was."""
    if cluster.classes[0].device.curve_file is not None:
        return ""
    return (
        f"This machine was never measured ({device_file()} is not there), so seconds are guesses. "
        f'"equipoise calibrate" takes a minute; then plan again.'
    )


def _doubt(
    request: RunPlanRequest,
    machine: Machine,
    encoders: RunEncoders | None,
    *,
    timed: int,
    listed: int,
) -> str:
    """What to say of prices that were not measured; nothing where all were."""
    run = request.run
    flags = "".join(f" --{name} {value}" for name, value in request.keys)
    command = f'"equipoise calibrate {request.file}{flags}"'
    if guess := guess_sentence(machine.cluster):
        return guess
    if timed and encoders is not None and not encoders.is_timed:
        return (
            f"The encoders of images and sound were never timed here, so they are priced from "
            f"kernels alone, which miss the host's time and the reading of files. {command} times "
            f"them; then plan again."
        )
    if timed == 0 and run.model.experts:
        return (
            "Steps of models with experts are priced from kernels alone, which miss the host's "
            "time: nothing times their parts."
        )
    if timed == 0:
        return (
            f"The parts of this run's steps were never timed here, so they are priced from kernels "
            f"alone, which miss the host's time. {command} times them; then plan again."
        )
    if timed < listed:
        return (
            f"{listed - timed:,} of {listed:,} choices mix ways of sharing a step, which nobody "
            f"timed here; they are left out."
        )
    return ""


def read_obeyed(
    file: Path, run: ResolvedRun, progress: Progress | None = None
) -> tuple[Plan, ResolvedRun]:
    """A fresh lock, and the run as it says.

    Raises:
        PlanError: not a lock, or a lock of a cluster, of layers that differ, of another version, or
            a stale one.
        SpecError: a key was given another value.
    """
    plan = read_plan(file)
    if "layers" in plan.best.words:
        raise PlanError(
            f"{file} gives layers strategies of their own ({plan.best.words['layers']}), and train "
            f"runs one for all. Plan without --layers own: equipoise plan run.toml."
        )
    if not plan.best.keys:
        raise PlanError(
            f"{file} plans {plan.asked.get('model')} on {plan.asked.get('cluster')}, and train "
            f"obeys plans of a run.toml on this machine. Make one: equipoise plan run.toml."
        )
    obeyed = obey(run, plan.best.keys, plan.command)
    ranks = obeyed.spec.layout.count_ranks(own_ranks())
    store = open_corpus(run, progress)
    now = digest_run(run, store, this_machine(ranks))
    require_fresh(plan, now, file)
    if plan.best.stages is not None:
        require_stages(plan.best.stages, obeyed.spec.layout, run.model.layers, file)
    return plan, obeyed


def digest_asked(plan: Plan, progress: Progress | None = None) -> dict[str, str]:
    """Digests of what the words of a run's plan read today."""
    asked = dict(plan.asked)
    file, ranks = Path(asked.pop(RUN_TOML)), int(asked.pop("ranks"))
    run = read_run(file, list(asked.items()))
    store = open_corpus(run, progress)
    return digest_run(run, store, this_machine(ranks))
