"""The run that ``equipoise launch`` starts and ``equipoise doctor`` examines, by their flags."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.base.read import real_path
from equipoise.cli.run_arguments import run_from

if TYPE_CHECKING:
    from equipoise.spec.cluster.spec import ClusterSpec
    from equipoise.spec.model.presets import ModelSpec
    from equipoise.spec.run.spec import RunSpec


@dataclass(frozen=True, slots=True)
class AskedRun:
    """A run to launch or examine, prepared or not."""

    spec: "RunSpec"
    model: "ModelSpec"
    folder: Path
    ranks: int
    corpus: str
    """Folder of its tokens; empty until they are made."""
    init_folder: str
    prepare: tuple[str, ...]
    """Arguments that prepare it; none once that is done."""


def add_asked_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which run, and on which nodes."""
    parser.add_argument(
        "run_toml",
        nargs="?",
        type=Path,
        metavar="run.toml|RUN",
        help="the run, or the folder of a prepared one (default: every key's default); "
        "--SECTION.KEY VALUE replaces any key of a run.toml",
    )
    parser.add_argument("--name", metavar="NAME", help="the run's name")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of a run.toml's run (default: runs/NAME)"
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="a run.toml's plan.lock, which the run obeys as under equipoise train",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME:DEVICES|FILE",
        help="as h100-sxm:16, or a cluster.toml (default: one node of CPU ranks)",
    )
    parser.set_defaults(overrides=[])


def cluster_from(args: argparse.Namespace) -> "ClusterSpec | None":
    """The named cluster, if any."""
    if args.cluster is None:
        return None
    from equipoise.spec.cluster.file import read_cluster

    return read_cluster(args.cluster)


def asked_from(args: argparse.Namespace, cluster: "ClusterSpec | None") -> AskedRun:
    """The run that the arguments name.

    Raises:
        SpecError: every fault of a run.toml; or keys given beside a prepared folder.
        LayoutError: degrees that do not go with the devices.
    """
    if args.run_toml is not None and args.run_toml.is_dir():
        return _prepared(args)
    from equipoise.observe.machine import own_ranks
    from equipoise.spec.run.obey import share_experts

    resolved = run_from(args)
    if args.plan is not None:
        from equipoise.plan.run import read_obeyed

        _, resolved = read_obeyed(args.plan, resolved)
    layout = resolved.spec.layout
    if layout.dp == "cores" and cluster is not None:
        ranks = cluster.devices
    else:
        ranks = layout.count_ranks(own_ranks())
    resolved = share_experts(resolved, ranks)
    layout = resolved.spec.layout
    layout.of_ranks(ranks).require_model(resolved.model)
    folder = real_path(args.out or Path("runs") / resolved.spec.name)
    words = ["train"]
    if args.run_toml is not None:
        words.append(str(real_path(args.run_toml)))
    words += [f"--{key}={text}" for key, text in args.overrides if key != "layout.dp"]
    if args.plan is not None:
        words += ["--plan", str(real_path(args.plan))]
    if args.name is not None:
        words += ["--name", args.name]
    data_ranks = ranks // layout.sharing
    words += [f"--layout.dp={data_ranks}", "--out", str(folder), "--prepare"]
    return AskedRun(resolved.spec, resolved.model, folder, ranks, "", "", tuple(words))


def _prepared(args: argparse.Namespace) -> AskedRun:
    from equipoise.spec.run.resolved import read_resolved

    given = [f"--{key}" for key, _ in args.overrides]
    given += [f"--{key}" for key in ("name", "out", "plan") if getattr(args, key) is not None]
    if given:
        raise SpecError(
            f"{args.run_toml} is prepared, and {', '.join(given)} would change it. Give its "
            f"run.toml instead of the folder, or leave {given[0]} out."
        )
    resolved = read_resolved(args.run_toml)
    return AskedRun(
        spec=resolved.spec,
        model=resolved.model,
        folder=real_path(args.run_toml),
        ranks=resolved.ranks,
        corpus=resolved.corpus,
        init_folder=resolved.init_folder,
        prepare=(),
    )
