"""A run, from a run.toml or a ``RunSpec`` to its record: what ``equipoise train`` does.

What it decides
    A run is refused before its corpus is read where the layout, the machine or the folder cannot
    carry it. Ranks are processes on this machine; asked again, a run goes on from its last
    checkpoint. ``prepare`` stops before ranks start, for a launcher of your own.

Kept true (tests/multi/train/test_request.py)
    A run from Python has the losses of the same run from the command line, to the bit.
"""

import importlib.util
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from equipoise.base.errors import LayoutError, ModelError
from equipoise.comm.group import choose_device
from equipoise.data.batch import check_vocabulary
from equipoise.data.cache.store import prepare as open_store
from equipoise.data.progress import Progress, SilentProgress
from equipoise.launch.local import Launch, require_free_folder, require_free_port, run_local
from equipoise.launch.room import require_room
from equipoise.observe import reader
from equipoise.observe.machine import usable_cores
from equipoise.observe.run_record import RunRecord
from equipoise.plan.run import read_obeyed
from equipoise.plan.space.accepted import require_accepted, require_step
from equipoise.sim.sharding import settle_machine
from equipoise.sim.stages import settle_edges
from equipoise.spec.catalog import POLICIES
from equipoise.spec.plan import LOCK
from equipoise.spec.run.keys import keys, toml
from equipoise.spec.run.load import read_run
from equipoise.spec.run.resolve import ResolvedRun
from equipoise.spec.run.resolved import ResolvedFile, write_resolved
from equipoise.spec.run.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run whose ranks may start."""

    folder: Path
    """Where ``python -m equipoise.train.worker`` finds it."""
    ranks: int


def run(
    run: Path | str | RunSpec | ResolvedRun,
    *,
    out: Path | str | None = None,
    plan: Path | str | None = None,
    port: int = 0,
    is_quiet: bool = True,
    progress: Progress | None = None,
) -> RunRecord:
    """Train on this machine's ranks, or go on from the run's last checkpoint.

    Args:
        run: A run.toml, a ``RunSpec`` whose relative paths start at the working directory, or
            what ``spec.run.load.read_run`` made of a file and flags.
        out: The run's folder; ``runs/NAME`` unless given.
        plan: A plan.lock of ``equipoise plan run.toml`` to obey.
        port: Where the ranks meet; any that is free unless given.
        is_quiet: Whether rank 0 shows no line for each step.
        progress: Hears of the corpus while it is read.

    Returns:
        The run's folder read back: loss, tokens and seconds of every step, of all its sessions.

    Raises:
        SpecError: every fault of the run's keys.
        PlanError: the plan is stale, or of something else.
        LayoutError: the layout does not go with the model, the policy or this machine.
        DataError: the corpus is missing or wrong.
        EquipoiseError: a rank failed; with its words.
    """
    prepared = _prepare(run, out, plan, port, is_quiet, progress, starts=True)
    run_local(Launch(prepared.folder, prepared.ranks, is_quiet, port))
    return reader.read_run(prepared.folder)


def prepare(
    run: Path | str | RunSpec | ResolvedRun,
    *,
    out: Path | str | None = None,
    plan: Path | str | None = None,
    port: int = 0,
    is_quiet: bool = True,
    progress: Progress | None = None,
) -> Prepared:
    """Make all that ranks will read, and start none: for a launcher of your own. As ``run``."""
    return _prepare(run, out, plan, port, is_quiet, progress, starts=False)


def resolve_run(run: Path | str | RunSpec | ResolvedRun) -> ResolvedRun:
    """A run with its model and every key judged.

    Raises:
        SpecError: every fault of the run's keys.
    """
    if isinstance(run, ResolvedRun):
        return run
    if isinstance(run, Path | str):
        return read_run(Path(run))
    values = {name: attrgetter(name)(run) for name in keys()}
    return read_run(
        None,
        [
            (name, value if isinstance(value, str) else toml(value))
            for name, value in values.items()
            if value != keys()[name].default
        ],
    )


def _prepare(
    run: Path | str | RunSpec | ResolvedRun,
    out: Path | str | None,
    plan: Path | str | None,
    port: int,
    is_quiet: bool,
    progress: Progress | None,
    *,
    starts: bool,
) -> Prepared:
    resolved, lock = resolve_run(run), None
    progress = progress or SilentProgress()
    if plan is not None:
        lock, resolved = read_obeyed(Path(plan), resolved, progress)
    spec, model = resolved.spec, resolved.model
    folder = Path(out or Path("runs") / spec.name).resolve()
    require_free_folder(folder)
    ranks = spec.layout.count_ranks(len(usable_cores()))
    if starts:
        require_room(ranks)
    if port:
        require_free_port(port)
    require_accepted(spec, model, ranks)
    init_folder = _init_folder(resolved)
    if spec.model.engine == "transformers":
        require_transformers()
        from equipoise.parallel.theirs.tried import require_exact_folder

        require_exact_folder(Path(init_folder), spec.pack.context_tokens)
    _require_device(spec)
    store = open_store(spec.data, resolved.base, progress=progress)
    check_vocabulary(store, model.vocab)
    if store.left_out and not is_quiet:
        sys.stdout.write(f"{store.source_name}: {store.left_out}.\n")
    require_step(spec, model, ranks, store.doc_tokens)
    stages = None if lock is None else lock.best.stages
    settled = ResolvedFile(
        spec=spec,
        model=model,
        origins=resolved.origins,
        ranks=ranks,
        corpus=str(store.folder.resolve()),
        init_folder=init_folder,
        context_machine=settle_machine(spec, model, ranks, folder),
        stage_edges=settle_edges(spec, model, folder, stages),
    )
    write_resolved(folder, settled)
    if lock is not None:
        lock.write(folder / LOCK)
    return Prepared(folder, ranks)


def require_transformers() -> None:
    """Refuse an engine that is not installed.

    Raises:
        ModelError: as above.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            'model.engine = "transformers" needs the package transformers, which is not installed. '
            "Run: pip install 'equipoise[transformers]'"
        )


def _init_folder(resolved: ResolvedRun) -> str:
    """The folder of the first weights; "" where they are random."""
    init = resolved.spec.model.init
    if init == "random":
        return ""
    return str((resolved.base / Path(init.removeprefix("hf:")).expanduser()).resolve())


def _require_device(spec: RunSpec) -> None:
    """Refuse what only CPU ranks do, where ranks run on CUDA devices.

    Raises:
        LayoutError: policy, context and device do not go together.
    """
    context, policy = spec.layout.cp, spec.pack.policy
    if choose_device(0).type == "cpu":
        return
    if context > 1:
        raise LayoutError(
            f"layout.cp = {context} shares a micro-batch between CPU ranks, and this "
            f"machine's ranks run on CUDA devices. Set layout.cp = 1."
        )
    if POLICIES[policy].runs_together:
        raise LayoutError(
            f'pack.policy = "{policy}" divides documents over CPU ranks, and this machine\'s ranks '
            f'run on CUDA devices. Set pack.policy = "by-work".'
        )
