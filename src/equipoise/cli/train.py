"""``equipoise train``: prepare the corpus, start the ranks, resume what was begun."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import LayoutError
from equipoise.cli.console import make_progress
from equipoise.cli.run_arguments import add_run_arguments, run_from
from equipoise.launch.local import (
    Launch,
    require_free_folder,
    require_free_port,
    run_local,
)
from equipoise.launch.room import require_room
from equipoise.observe.machine import usable_cores
from equipoise.spec.plan import LOCK

if TYPE_CHECKING:
    from equipoise.spec.run.resolve import ResolvedRun
    from equipoise.spec.run.resolved import ResolvedFile
    from equipoise.spec.run.spec import RunSpec

HELP = "train a model; the same command again resumes"

EXAMPLES = """\
examples:
  equipoise train                                    the defaults: this Python's own library
  equipoise train run.toml
  equipoise train run.toml --train.steps 500 --pack.policy in-order --out runs/plain
  equipoise plan run.toml && equipoise train run.toml --plan plan.lock
  torchrun --nproc-per-node 2 -m equipoise.train.worker runs/run
                                                     ranks under your own launcher, after
                                                     equipoise train run.toml --prepare
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the run's folder (default: runs/NAME)"
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="obey this plan.lock of equipoise plan run.toml: layout, schedule, recomputation and "
        "packing are its; a key that says otherwise, or a lock of another model, corpus, machine "
        "or version, is refused",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="port where the ranks meet (default: any that is free)",
    )
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="make the token cache and the run's folder, start no rank",
    )


def prepare_run(resolved: "ResolvedRun", folder: Path, *, quiet: bool) -> "ResolvedFile":
    """Make the token cache and write the run's folder; what the ranks will read."""
    from equipoise.data.batch import check_vocabulary
    from equipoise.data.cache.store import prepare
    from equipoise.plan.space.accepted import require_accepted, require_step
    from equipoise.sim.sharding import settle_machine
    from equipoise.spec.run.resolved import ResolvedFile, write_resolved

    ranks = resolved.spec.layout.count_ranks(len(usable_cores()))
    require_accepted(resolved.spec, resolved.model, ranks)
    _require_device(resolved.spec)
    store = prepare(resolved.spec.data, resolved.base, progress=make_progress(quiet))
    check_vocabulary(store, resolved.model.vocab)
    if store.left_out and not quiet:
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
    return settled


def _require_device(spec: "RunSpec") -> None:
    """Refuse what only CPU ranks do, where ranks run on CUDA devices.

    Raises:
        LayoutError: policy, context and device do not go together.
    """
    from equipoise.balance.packing.turns import TOGETHER
    from equipoise.comm.group import choose_device

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


def run(args: argparse.Namespace) -> int:
    """Train, or resume."""
    resolved, plan = run_from(args), None
    if args.plan is not None:
        from equipoise.plan.run import read_obeyed

        progress = make_progress(args.quiet or args.json)
        plan, resolved = read_obeyed(args.plan, resolved, progress)
    folder: Path = (args.out or Path("runs") / resolved.spec.name).resolve()
    require_free_folder(folder)
    if not args.prepare:
        require_room(resolved.spec.layout.count_ranks(len(usable_cores())))
    if args.port:
        require_free_port(args.port)
    settled = prepare_run(resolved, folder, quiet=args.quiet or args.json)
    if plan is not None:
        plan.write(folder / LOCK)
    if args.prepare:
        shown = {"run": str(folder), "ranks": settled.ranks}
        text = (
            f"Prepared {folder} for {settled.ranks} ranks. Start them with: torchrun "
            f"--nproc-per-node {settled.ranks} -m equipoise.train.worker {folder}"
        )
        sys.stdout.write((json.dumps(shown) if args.json else text) + "\n")
        return 0
    run_local(Launch(folder, settled.ranks, args.quiet or args.json, args.port))
    if args.json:
        sys.stdout.write(json.dumps(_last_step(folder)) + "\n")
    return 0


def _last_step(folder: Path) -> dict[str, object]:
    """The run's folder and the figures of its last step."""
    from equipoise.observe.reader import read_run

    record = read_run(folder)
    return {
        "run": str(folder),
        "step": int(record.step[-1]) if len(record.step) else 0,
        "loss": float(record.loss[-1]) if len(record.step) else None,
    }
