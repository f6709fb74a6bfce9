"""``equipoise calibrate``: measure this machine, hold its curves against a run, correct them."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import DataError, SpecError
from equipoise.base.read import reason
from equipoise.cli.console import make_progress
from equipoise.cli.recommend.calibrate import calibrate_recommend
from equipoise.cli.run_arguments import add_run_arguments, asks_recommender, run_from
from equipoise.cli.written import require_folder_of, require_kind, require_writable

if TYPE_CHECKING:
    from equipoise.observe.run_record import RunRecord
    from equipoise.schedule.attention.price import LinkPrice
    from equipoise.spec.device.driver import CudaDevice
    from equipoise.spec.device.file import DeviceFile
    from equipoise.spec.device.parts import ModelParts
    from equipoise.spec.modality.items import Items
    from equipoise.spec.model.presets import ModelSpec
    from equipoise.spec.run.resolve import ResolvedRun
    from equipoise.train.calibrate.parts_plan import PartsPlan

HELP = "measure this machine, so that this-cpu or this-cuda is priced by what it does"

EXAMPLES = """\
examples:
  equipoise calibrate                                under a minute; this-cpu is priced by it,
                                                     or this-cuda where there are CUDA devices
  CUDA_VISIBLE_DEVICES= equipoise calibrate          the cores of a machine that has devices
  equipoise calibrate run.toml                       also the sizes and parts of this run's steps;
                                                     two minutes, and again goes on
  equipoise calibrate recipes/recommend/run.toml     a recommender: what its lookups, exchange and
                                                     dense part take, for plan and simulate
  equipoise calibrate --plot curves.png --out lab.json
  equipoise calibrate --compare runs/demo            predicted beside measured, and the wrong curve
  equipoise calibrate --fit runs/demo                correct the curves by what the run measured
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the device file to write, or to compare and fit "
        "(default: ~/.cache/equipoise/this-cpu.json, which this-cpu reads, or "
        "this-cuda-PRODUCT.json beside it)",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="RUN",
        help="measure nothing; show a run's seconds beside the device file's",
    )
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="RUN",
        help="as --compare, and keep measured over predicted seconds in the device file",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the curves (.png, .svg or .pdf)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, or compare."""
    if asks_recommender(args):
        return calibrate_recommend(args, add_arguments)
    from equipoise.spec.device.cuda import cuda_file, one_product
    from equipoise.spec.device.driver import cuda_devices
    from equipoise.spec.device.here import cpu_model, device_file

    _judge(args)
    devices = cuda_devices()
    machine = one_product(devices) if devices else cpu_model()
    usual = cuda_file(machine) if devices else device_file()
    file: Path = usual if args.out is None else args.out
    if args.compare is not None or args.fit is not None:
        return _compare(args, file)
    from equipoise.launch.agent import whole_environment
    from equipoise.spec.device.file import write_device_file
    from equipoise.train.calibrate.model import join_parts
    from equipoise.train.calibrate.parts_plan import PartsPlan

    # What is timed here has the variables of ranks that train.
    os.environ.update(whole_environment())
    resolved = run_from(args)
    has_run = (args.run_toml is not None or args.overrides) and not resolved.model.experts
    # Devices multiply fp8, and are priced from its products alone.
    has_run = has_run and not (devices and resolved.spec.train.precision == "fp8")
    items = None
    if has_run and resolved.spec.encoders and not devices:
        from equipoise.plan.run import open_corpus

        items = open_corpus(resolved, make_progress(args.quiet or args.json)).require_items()
    plan = PartsPlan.for_run(resolved, items) if has_run else None
    folder = file.absolute().parent
    _make(folder)
    kept = _kept_parts(file, machine)
    if plan is not None and not devices:
        measured = _measure_run(args, resolved, plan, file, kept, items)
        _show(args, file, measured)
        return 0
    measured = _measure(args, resolved, devices, folder)
    measured = dataclasses.replace(measured, parts=kept)
    write_device_file(file, measured)
    if plan is not None:
        parts = _time_parts(args, plan, file, len(devices))
        measured = dataclasses.replace(measured, parts=join_parts(kept, parts))
        write_device_file(file, measured)
    _show(args, file, measured)
    return 0


def _show(args: argparse.Namespace, file: Path, measured: "DeviceFile") -> None:
    """Print and draw what was measured."""
    from equipoise.cli.calibrate.table import file_rows, print_file

    if args.plot is not None:
        from equipoise.dash.calibrate_plot import plot_device_file

        plot_device_file(args.plot, measured)
    if args.json:
        import json

        sys.stdout.write(json.dumps(file_rows(measured) | {"file": str(file)}, indent=1) + "\n")
    elif not args.quiet:
        print_file(measured, file)
        if args.plot is not None:
            sys.stdout.write(f"{args.plot}\n")


def _measure_run(
    args: argparse.Namespace,
    resolved: "ResolvedRun",
    plan: "PartsPlan",
    file: Path,
    kept: "tuple[ModelParts, ...]",
    items: "Items | None",
) -> "DeviceFile":
    """The cores of this machine and the parts of a run's steps, as far as two minutes go."""
    from equipoise.observe.machine import usable_cores
    from equipoise.spec.device.file import write_device_file
    from equipoise.train.calibrate.budgeted import (
        RunCalibration,
        calibrate_run,
        device_file_of,
        require_needed,
    )
    from equipoise.train.calibrate.items import encoder_points
    from equipoise.train.calibrate.measure import MOST_RANKS
    from equipoise.train.calibrate.model import join_parts, put_together
    from equipoise.train.calibrate.ranks import Target
    from equipoise.train.calibrate.session import open_session, session_file

    target = Target.cores(min(len(usable_cores()), MOST_RANKS))
    folder = file.absolute().parent
    calibration = RunCalibration.for_run(resolved, plan, target, folder, items)
    session = open_session(session_file(file), calibration.key)
    if session.done and not args.quiet:
        sys.stderr.write(
            f"Goes on with a calibration that was begun before: {len(session.done)} of its "
            f"{len(calibration.tasks())} tasks are done.\n"
        )
    progress = make_progress(args.quiet or args.json)
    tasks = calibration.tasks()
    left = calibrate_run(tasks, session, progress)
    require_needed(tasks, left, session.other_cores)
    measured = dataclasses.replace(device_file_of(session, calibration.plan, left), parts=kept)
    write_device_file(file, measured)
    by_way = {way: session.ways[way] for way in calibration.ways if way in session.ways}
    parts = put_together(plan, by_way, _own_link(file, target.ranks))
    parts = dataclasses.replace(parts, encoders=encoder_points(plan, session.taken))
    measured = dataclasses.replace(measured, parts=join_parts(kept, parts))
    write_device_file(file, measured)
    if not left:
        session.end()
    return measured


def _own_link(file: Path, ranks: int) -> "LinkPrice":
    """The link between ranks of this machine, as its device file has it."""
    from equipoise.schedule.attention.price import LinkPrice
    from equipoise.sim.machine import Machine
    from equipoise.spec.cluster.spec import own_cluster
    from equipoise.spec.device.by_name import own_device
    from equipoise.spec.layout import Layout

    if ranks == 1:  # nobody to share attention with
        return LinkPrice(0.0, float("inf"))
    machine = Machine(own_cluster(own_device(file), ranks))
    return machine.context_links(Layout(cp=ranks)).near


def _measure(
    args: argparse.Namespace,
    resolved: "ResolvedRun",
    devices: "tuple[CudaDevice, ...]",
    folder: Path,
) -> "DeviceFile":
    """The machine's CUDA devices; its cores if it has none."""
    from equipoise.train.calibrate.devices import measure_devices
    from equipoise.train.calibrate.measure import measure_machine
    from equipoise.train.calibrate.plan import CalibrationPlan

    progress = make_progress(args.quiet or args.json)
    if not devices:
        return measure_machine(CalibrationPlan.for_run(resolved), folder, progress)
    sizes = CalibrationPlan.for_run(resolved, CalibrationPlan.of_devices())
    return measure_devices(sizes, devices, folder, progress)


def _kept_parts(file: Path, machine: str) -> "tuple[ModelParts, ...]":
    """Parts of models already timed on this machine with this torch; none if the file has none."""
    from importlib.metadata import version

    from equipoise.spec.device.file import read_device_file

    try:
        measured = read_device_file(file)
    except SpecError:
        return ()
    torch = version("torch").partition("+")[0]
    is_here = measured.machine == machine and measured.torch.partition("+")[0] == torch
    return measured.parts if is_here else ()


def _time_parts(
    args: argparse.Namespace, plan: "PartsPlan", file: Path, devices: int
) -> "ModelParts":
    """The parts of a run's steps on devices, with the links of the device file."""
    from equipoise.train.calibrate.model import measure_parts
    from equipoise.train.calibrate.ranks import Target

    progress = make_progress(args.quiet or args.json)
    return measure_parts(plan, _own_link(file, devices), progress, Target.cuda(devices))


def _judge(args: argparse.Namespace) -> None:
    if args.compare is not None and args.fit is not None:
        raise SpecError("--compare and --fit exclude each other: --fit shows the comparison too.")
    asked = args.compare or args.fit
    if asked is not None and (args.run_toml is not None or args.overrides or args.plot):
        flag = "--compare" if args.fit is None else "--fit"
        raise SpecError(
            f"{flag} {asked} measures nothing, so a run.toml, its keys and --plot say nothing to "
            f"it. Leave them out."
        )
    require_kind("plot", args.plot, "picture")
    require_folder_of("plot", args.plot)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"--out: the folder {folder} cannot be made: {(error.strerror or str(error)).lower()}."
        ) from None
    require_writable("out", folder)


def _compare(args: argparse.Namespace, file: Path) -> int:
    from equipoise.cli.calibrate.table import print_comparison
    from equipoise.cost.compare import compare_run, fitted
    from equipoise.observe.reader import read_run
    from equipoise.spec.device.by_name import own_device
    from equipoise.spec.device.file import read_device_file, write_device_file

    measured = read_device_file(file)
    record, model = _judge_start(read_run(args.compare or args.fit))
    device = own_device(file)
    comparison = compare_run(record, model, device)
    if args.fit is not None:
        write_device_file(file, fitted(measured, comparison))
    if args.json:
        import json

        sys.stdout.write(json.dumps(comparison.as_row(), indent=1) + "\n")
    elif not args.quiet:
        is_fitted = args.fit is not None
        print_comparison(comparison, record.folder, file, is_fitted=is_fitted, name=device.name)
    return 0


def _judge_start(record: "RunRecord") -> "tuple[RunRecord, ModelSpec]":
    """A run whose start says all that is compared, absent keys with their defaults; its model.

    Raises:
        DataError: the start event says something that no run does.
    """
    import json

    from pydantic import TypeAdapter

    from equipoise.spec.model.presets import ModelSpec
    from equipoise.spec.run.keys import to_dict
    from equipoise.spec.run.spec import RunSpec

    start = record.start
    said = {name: start.spec[name] for name in ("layout", "pack", "train") if name in start.spec}
    try:
        spec = TypeAdapter(RunSpec).validate_json(json.dumps(said), strict=True)
        model = TypeAdapter(ModelSpec).validate_json(json.dumps(start.model), strict=True)
    except ValueError as error:
        raise DataError(
            f"{record.folder} has a start event in its journal that no run writes: "
            f"{reason(error)}. Copy journal/rank-00000.jsonl again."
        ) from None
    return dataclasses.replace(record, start=dataclasses.replace(start, spec=to_dict(spec))), model
