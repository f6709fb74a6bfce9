"""``equipoise convert``: a checkpoint becomes a Hugging Face folder, or one of another layout."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import ModelError, SpecError
from equipoise.base.units import format_bytes, format_count
from equipoise.cli.console import make_progress
from equipoise.cli.convert import experts, layout, recommend
from equipoise.spec.names import CHECKPOINTS, RESOLVED, is_recommender

if TYPE_CHECKING:
    from equipoise.data.progress import Progress
    from equipoise.serve.routes import Clustered

HELP = "turn a checkpoint into a Hugging Face folder, or rewrite it for another layout"

EXAMPLES = """\
examples:
  equipoise convert runs/run exported                the newest whole checkpoint of a run
  equipoise convert runs/run/checkpoint/step-000250 exported --dtype bf16
  equipoise convert runs/run adapter --adapter       LoRA alone, as peft loads it
  equipoise convert runs/run mean --average runs/run/checkpoint/step-000200 runs/other
  equipoise convert runs/one between --interpolate runs/other 0.3     0.7 of one, 0.3 of the other
  equipoise convert runs/run clustered --cluster-experts 2   experts that the same tokens choose on
                                                     one of 2 ranks, for experts.policy speculative
  equipoise convert SmolLM2-135M.Q8_0.gguf smollm2   dequantised
  equipoise convert runs/run --layout dp=4,tp=2 --dry-run    bytes and seconds of each rank
  equipoise convert runs/run runs/tp2 --layout dp=4,tp=2     a checkpoint as these ranks want it
  equipoise convert runs/ml-100k small --budget 0.001        a recommender in the fewest bits that
                                                     lose 0.1% of normalised entropy; serve it

A run starts from such a folder: equipoise train --model.init hf:exported

A run that began from a Hugging Face folder gets that folder's files back: config, generation
config, tokenizer, chat template. stderr says what differs, such as positions raised to the windows
that it trained with.

Any layout resumes any checkpoint as it is, and its ranks read the bytes that they need. --layout
counts them; with TO it writes a folder in which each rank's part is one file, for runs that load a
checkpoint often or from far away: equipoise train run.toml --out runs/tp2 --layout.tp 2.

--json prints {"folder", "from", "step", "model_type", "params", "dtype", "bytes", "tokenizer",
"chat_template", "remarks", "merged"}. Unknown is null; "merged" has the share of each model by its
name, and is empty where there is one alone. With --cluster-experts there is "experts" too:
{"ranks", "fitted_tokens", "held_tokens", "left_out", "predicted", "in_order", "known", "own",
"skew"}. With --layout it prints {"folder", "from", "step", "ranks_before", "layout", "stage_edges",
"stored_bytes", "ranks": [{"needed_bytes", "read_bytes", "ranges"}], "needed_bytes", "read_bytes",
"disk_bytes_per_s", "shared_disk_s", "own_disk_s", "passed_over"}. Of a recommender it prints
{"folder", "name", "from", "step", "budget", "bytes", "loss", "held_out", "parts", "tried",
"windows"}, the "ranking.json" of the folder.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "source", type=Path, metavar="FROM", help="a run's folder, a checkpoint, or a .gguf file"
    )
    parser.add_argument(
        "target",
        type=Path,
        nargs="?",
        metavar="TO",
        help="folder to make; not needed with --dry-run",
    )
    parser.add_argument(
        "--to", choices=["hf"], default="hf", help="form to write (default: hf, the only one)"
    )
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        help="dtype of the written weights (default: that of the Hugging Face folder that the run "
        "began from, else fp32, as trained)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters of a run with [lora] for peft, instead of a model in which they "
        "are merged",
    )
    merges = parser.add_mutually_exclusive_group()
    merges.add_argument(
        "--average",
        type=Path,
        nargs="+",
        metavar="OTHER",
        help="write the mean of the weights of FROM and of these runs, checkpoints or folders",
    )
    merges.add_argument(
        "--interpolate",
        nargs=2,
        metavar=("OTHER", "SHARE"),
        help="write (1 - SHARE) of the weights of FROM and SHARE of OTHER's, from 0 to 1",
    )
    merges.add_argument(
        "--cluster-experts",
        type=int,
        metavar="RANKS",
        help="renumber the experts of a run's model so that those which the same tokens of its "
        "corpus choose lie on one of RANKS, write the table for experts.policy speculative, and "
        "say how many rows then stay on their rank, on the run's held-out documents",
    )
    parser.add_argument(
        "--layout",
        metavar="WORDS",
        help="write a checkpoint for these ranks instead, as dp=4,tp=2; also cp=, pp=, "
        "ep=, etp=, zero=, replicas=, virtual=",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="with --layout: print what each rank would read, and write nothing",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json to copy (default: the run's or the GGUF's own)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SHARE",
        help="of a recommender: by how much its normalised entropy may grow for fewer bits "
        "(default: 0.001)",
    )
    parser.add_argument(
        "--stream",
        type=Path,
        metavar="FILE",
        help="of a recommender: later samples to follow, so that drift shows and is answered "
        "(default: its test split)",
    )


def run(args: argparse.Namespace) -> int:
    """Read, convert, write, and say what was written."""
    target: Path | None = args.target
    if is_recommender(args.source):
        return recommend.run(args)
    for name in ("budget", "stream"):
        if getattr(args, name) is not None:
            raise SpecError(
                f"--{name} is for a recommender's run, and {args.source} is none. Leave it out."
            )
    if args.layout is not None:
        _require_checkpoint(args.source)
        return layout.run(args)
    if args.dry_run:
        raise SpecError("--dry-run belongs to --layout. Give the layout, as --layout dp=4,tp=2.")
    if target is None:
        raise SpecError("convert needs TO, the folder to make.")
    if target.exists():
        raise ModelError(f"{target} already exists. Name a new folder, or delete it.")
    _require_source(args.source)  # before torch is loaded: a wrong path is refused at once
    parts = _parts(args)
    if args.cluster_experts is not None and (args.adapter or args.source.is_file()):
        raise SpecError(
            "--cluster-experts follows the routers of a run's model over the run's corpus. Give a "
            "run or a checkpoint, and leave --adapter out."
        )
    if args.adapter:
        return _write_adapter(args)
    from equipoise.serve.convert import write_folder
    from equipoise.serve.source import open_merged, open_model

    silent = args.quiet or args.json
    progress = make_progress(silent)
    clustered = _cluster(args, progress) if args.cluster_experts is not None else None
    progress.start(f"convert {args.source.name}", 2)
    try:
        if clustered is not None:
            trained = clustered.trained
        else:
            trained = open_merged(parts) if parts else open_model(args.source)
        progress.advance(1)
        written = write_folder(trained, target, dtype=args.dtype, tokenizer_file=args.tokenizer)
        progress.advance(1)
    finally:
        progress.finish()
    if not silent:
        sys.stderr.writelines(f"{remark}\n" for remark in written.remarks)
    size_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    if args.json:
        answer = {
            "folder": str(target),
            "from": str(trained.origin),
            "step": trained.step,
            "model_type": written.model_type,
            "params": trained.params,
            "dtype": written.dtype,
            "bytes": size_bytes,
            "tokenizer": written.has_tokenizer,
            "chat_template": written.has_template,
            "remarks": written.remarks,
            "merged": {str(source): share for source, share in parts},
        }
        if clustered is not None:
            answer["experts"] = experts.facts(clustered)
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
    elif args.quiet:
        sys.stdout.write(f"{target}\n")
    else:
        with_tokenizer = "with" if written.has_tokenizer else "without"
        template = " and its chat template" if written.has_template else ""
        sys.stdout.write(
            f"Wrote {target}: {written.model_type}, {format_count(trained.params)} "
            f"parameters in {written.dtype}, {format_bytes(size_bytes)}, {with_tokenizer} a "
            f"tokenizer{template}, from {_named(parts) or trained.origin}.\n"
        )
        if clustered is not None:
            sys.stdout.write(experts.describe(clustered))
    return 0


def _cluster(args: argparse.Namespace, progress: "Progress") -> "Clustered":
    """The run's model with its experts clustered."""
    from equipoise.serve.routes import cluster_model
    from equipoise.serve.source import open_model

    return cluster_model(open_model(args.source), args.cluster_experts, progress=progress)


def _parts(args: argparse.Namespace) -> list[tuple[Path, float]]:
    """The models to merge and their shares; empty where there is one alone.

    Raises:
        SpecError: a share is not one, or adapters were asked for.
    """
    if args.average is None and args.interpolate is None:
        return []
    if args.adapter:
        raise SpecError("--adapter writes adapters alone, which are not merged. Leave it out.")
    if args.average is not None:
        sources = [args.source, *args.average]
        parts = [(source, 1 / len(sources)) for source in sources]
    else:
        other, text = args.interpolate
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise SpecError(f"--interpolate: {text} is not a share. Give a number from 0 to 1.")
        parts = [(args.source, 1 - share), (Path(other), share)]
    names = [str(source) for source, _ in parts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SpecError(f"{twice[0]} is given twice. Give each model once.")
    for source, _ in parts[1:]:
        if not source.exists():
            raise SpecError(
                f"No such file or folder: {source}. Give a run, a checkpoint, a Hugging Face "
                f"folder, or a .gguf file."
            )
    return parts


def _named(parts: list[tuple[Path, float]]) -> str:
    return " and ".join(f"{share:.3g} of {source}" for source, share in parts)


def _write_adapter(args: argparse.Namespace) -> int:
    """Write a folder for peft, and say what was written."""
    from equipoise.serve.adapter import export_adapter

    if args.source.is_file():
        raise SpecError(f"{args.source} has no adapters. Give a run or a checkpoint.")
    if given := layout.given_flags(args, ("dtype", "tokenizer")):
        raise SpecError(
            f"{given[0]} is for a model, and --adapter writes adapters alone. Leave one out."
        )
    written = export_adapter(args.source, args.target)
    if not (args.quiet or args.json):
        sys.stderr.writelines(f"{remark} Passed over.\n" for remark in written.remarks)
    if args.json:
        answer = {
            "folder": str(args.target),
            "from": str(written.origin),
            "step": written.step,
            "params": written.params,
            "rank": written.lora.rank,
            "base": written.base or None,
            "remarks": written.remarks,
        }
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
    elif args.quiet:
        sys.stdout.write(f"{args.target}\n")
    else:
        beside = f" beside {written.base}" if written.base else ""
        sys.stdout.write(
            f"Wrote {args.target}: adapters of rank {written.lora.rank}, "
            f"{format_count(written.params)} parameters{beside}, from {written.origin}.\n"
        )
    return 0


def _require_checkpoint(source: Path) -> None:
    """Refuse what has no checkpoint.

    Raises:
        SpecError: it is neither a run nor a checkpoint.
    """
    _require_source(source)
    if source.is_file():
        raise SpecError(f"{source} has no checkpoint that --layout could rewrite. Give a run.")


def _require_source(source: Path) -> None:
    """Refuse what cannot be converted.

    Raises:
        SpecError: it is neither a run, a checkpoint nor a GGUF file.
    """
    from equipoise.checkpoint.manifest import MANIFEST

    if not source.exists():
        raise SpecError(
            f"No such file or folder: {source}. Give a run, a checkpoint, or a .gguf file."
        )
    if source.is_file():
        if source.suffix != ".gguf":
            raise SpecError(
                f"{source} is not a .gguf file. Give a run, a checkpoint, or a .gguf file."
            )
    elif (
        (source / MANIFEST).exists()
        or (source / CHECKPOINTS).is_dir()
        or (source / RESOLVED).exists()
    ):
        return
    elif (source / "config.json").exists():
        raise SpecError(
            f"{source} is a Hugging Face folder already. A run starts from it with "
            f'model.init = "hf:{source}".'
        )
    else:
        raise SpecError(
            f"{source} is neither a run (it has no {CHECKPOINTS}/) nor a checkpoint (it has no "
            f"{MANIFEST}). Give one of them, or a .gguf file."
        )
