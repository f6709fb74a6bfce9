"""A run, from a run.toml or a ``RunSpec`` to its record: what ``equipoise train`` does.

What it decides
    A run is refused before its corpus is read where the layout, the machine or the folder cannot
    carry it. Ranks are processes on this machine; asked again, a run goes on from its last
    checkpoint. ``prepare_run`` stops before ranks start, for a launcher of your own.

Kept true (tests/multi/train/test_request.py)
    A run from Python has the losses of the same run from the command line, to the bit.
"""

import sys
from operator import attrgetter
from pathlib import Path

from equipoise.balance.packing.turns import TOGETHER
from equipoise.base.errors import LayoutError
from equipoise.comm.group import choose_device
from equipoise.data.batch import check_vocabulary
from equipoise.data.cache.store import prepare
from equipoise.data.progress import Progress, SilentProgress
from equipoise.launch.local import Launch, require_free_folder, require_free_port, run_local
from equipoise.launch.room import require_room
from equipoise.observe import reader
from equipoise.observe.machine import usable_cores
from equipoise.observe.run_record import RunRecord
from equipoise.plan.space.accepted import require_accepted, require_step
from equipoise.sim.sharding import settle_machine
from equipoise.spec.plan import LOCK, Plan
from equipoise.spec.run.keys import keys, toml
from equipoise.spec.run.load import read_run
from equipoise.spec.run.resolve import ResolvedRun
from equipoise.spec.run.resolved import ResolvedFile, write_resolved
from equipoise.spec.run.spec import RunSpec


def run(
    run: Path | str | RunSpec | ResolvedRun,
    *,
    out: Path | str | None = None,
    plan: Plan | None = None,
    port: int = 0,
    is_quiet: bool = True,
    progress: Progress | None = None,
) -> RunRecord:
    """Train on this machine's ranks, or go on from the run's last checkpoint.

    Args:
        run: A run.toml, a ``RunSpec`` whose relative paths start at the working directory, or
            what ``spec.run.load.read_run`` made of a file and flags.
        out: The run's folder; ``runs/NAME`` unless given.
        plan: What this run obeys; its keys are already the run's.
        port: Where the ranks meet; any that is free unless given.
        is_quiet: Whether rank 0 shows no line for each step.
        progress: Hears of the corpus while it is read.

    Returns:
        The run's folder read back: loss, tokens and seconds of every step, of all its sessions.

    Raises:
        SpecError: every fault of the run's keys.
        LayoutError: the layout does not go with the model, the policy or this machine.
        DataError: the corpus is missing or wrong.
        EquipoiseError: a rank failed; with its words.
    """
    resolved = resolve_run(run)
    folder = folder_of(resolved, out, port)
    require_room(resolved.spec.layout.count_ranks(len(usable_cores())))
    settled = prepare_run(resolved, folder, plan=plan, is_quiet=is_quiet, progress=progress)
    run_local(Launch(folder, settled.ranks, is_quiet, port))
    return reader.read_run(folder)


def folder_of(resolved: ResolvedRun, out: Path | str | None, port: int = 0) -> Path:
    """The folder of a run, absolute.

    Raises:
        EquipoiseError: another run holds the folder, or somebody listens on the port.
    """
    folder = Path(out or Path("runs") / resolved.spec.name).resolve()
    require_free_folder(folder)
    if port:
        require_free_port(port)
    return folder


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


def prepare_run(
    resolved: ResolvedRun,
    folder: Path,
    *,
    plan: Plan | None = None,
    is_quiet: bool = True,
    progress: Progress | None = None,
) -> ResolvedFile:
    """Make the token cache and write the run's folder: all that the ranks will read.

    Raises:
        LayoutError: the layout does not go with the model, the policy or this machine.
        DataError: the corpus is missing or wrong.
    """
    ranks = resolved.spec.layout.count_ranks(len(usable_cores()))
    require_accepted(resolved.spec, resolved.model, ranks)
    _require_device(resolved.spec)
    store = prepare(resolved.spec.data, resolved.base, progress=progress or SilentProgress())
    check_vocabulary(store, resolved.model.vocab)
    if store.left_out and not is_quiet:
        sys.stdout.write(f"{store.source_name}: {store.left_out}.\n")
    require_step(resolved.spec, resolved.model, ranks, store.doc_tokens)
    init = resolved.spec.model.init
    settled = ResolvedFile(
        spec=resolved.spec,
        model=resolved.model,
        origins=resolved.origins,
        ranks=ranks,
        corpus=str(store.folder.resolve()),
        init_folder=str((resolved.base / init.removeprefix("hf:")).resolve())
        if init != "random"
        else "",
        context_machine=settle_machine(resolved.spec, resolved.model, ranks, folder),
    )
    write_resolved(folder, settled)
    if plan is not None:
        plan.write(folder / LOCK)
    return settled


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
    if policy in TOGETHER:
        raise LayoutError(
            f'pack.policy = "{policy}" divides documents over CPU ranks, and this machine\'s ranks '
            f'run on CUDA devices. Set pack.policy = "by-work".'
        )
