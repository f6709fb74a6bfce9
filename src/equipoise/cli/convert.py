"""``equipoise convert``: a checkpoint or a GGUF file becomes a Hugging Face folder."""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import CheckpointError, DataError, ModelError, SpecError
from equipoise.base.units import format_bytes, format_count
from equipoise.checkpoint.manifest import MANIFEST, newest_good, read_manifest
from equipoise.cli.console import make_progress
from equipoise.serve.their_checkpoint import find_theirs
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.names import RESOLVED

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.serve.their_checkpoint import TheirCheckpoint

HELP = "turn a checkpoint or a GGUF file into a Hugging Face folder"

EXAMPLES = """\
examples:
  equipoise convert runs/run exported                the newest whole checkpoint of a run
  equipoise convert runs/run/checkpoint/step-000250 exported --dtype bf16
  equipoise convert SmolLM2-135M.Q8_0.gguf smollm2   dequantised

A run starts from such a folder: equipoise train --model.init hf:exported

--json prints {"folder", "from", "step", "model_type", "params", "dtype", "bytes", "tokenizer"}.
Unknown is null.
"""

_CHECKPOINTS = "checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "source", type=Path, metavar="FROM", help="a run's folder, a checkpoint, or a .gguf file"
    )
    parser.add_argument("target", type=Path, metavar="TO", help="folder to make")
    parser.add_argument(
        "--to", choices=["hf"], default="hf", help="form to write (default: hf, the only one)"
    )
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        help="dtype of the written weights (default: fp32, as trained; for model.engine = "
        '"transformers" that of its config.json)',
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json to copy (default: the run's or the GGUF's own)",
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What will be written, whatever it was read from."""

    origin: Path
    model: ModelSpec
    state: "dict[str, Tensor]"
    step: int | None
    context_tokens: int | None
    tokenizer_json: str | None
    tokenizer_config: dict[str, str]
    remarks: list[str]


def run(args: argparse.Namespace) -> int:
    """Read, convert, write, and say what was written."""
    target: Path = args.target
    if target.exists():
        raise ModelError(f"{target} already exists. Name a new folder, or delete it.")
    if (theirs := find_theirs(args.source)) is not None:
        _write_theirs(theirs, args)
        return 0
    read = _reader(args.source)  # before torch is loaded: a wrong path is refused at once
    import torch

    from equipoise.nn.hf.write import write_hf

    silent = args.quiet or args.json
    progress = make_progress(silent)
    progress.start(f"convert {args.source.name}", 2)
    try:
        loaded = read(args.source)
        progress.advance(1)
        state = loaded.state
        if args.dtype == "bf16":
            state = {name: weight.to(torch.bfloat16) for name, weight in state.items()}
        with tempfile.TemporaryDirectory() as folder:
            tokenizer_file, settings = _tokenizer(args.tokenizer, loaded, Path(folder))
            write_hf(
                target,
                loaded.model,
                state,
                tokenizer_file=tokenizer_file,
                tokenizer_config=settings,
                context_tokens=loaded.context_tokens,
            )
        progress.advance(1)
    finally:
        progress.finish()
    if not silent:
        sys.stderr.writelines(f"{remark}\n" for remark in loaded.remarks)
    shown = {
        "folder": str(target),
        "from": str(loaded.origin),
        "step": loaded.step,
        "model_type": json.loads((target / "config.json").read_text())["model_type"],
        "params": loaded.model.params,
        "dtype": args.dtype or "fp32",
        "bytes": sum(path.stat().st_size for path in target.iterdir()),
        "tokenizer": tokenizer_file is not None,
    }
    if args.json:
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    elif args.quiet:
        sys.stdout.write(f"{target}\n")
    else:
        with_tokenizer = "with" if tokenizer_file is not None else "without"
        dtype = shown["dtype"]
        sys.stdout.write(
            f"Wrote {target}: {shown['model_type']}, {format_count(loaded.model.params)} "
            f"parameters in {dtype}, {format_bytes(shown['bytes'])}, {with_tokenizer} a "
            f"tokenizer, from {loaded.origin}.\n"
        )
    return 0


def _write_theirs(checkpoint: "TheirCheckpoint", args: argparse.Namespace) -> None:
    """Write the model of a run whose engine is transformers."""
    from equipoise.serve.theirs import write_theirs

    silent = args.quiet or args.json
    progress = make_progress(silent)
    progress.start(f"convert {args.source.name}", 1)
    try:
        shown = write_theirs(checkpoint, args.target, dtype=args.dtype, tokenizer=args.tokenizer)
        progress.advance(1)
    finally:
        progress.finish()
    if not silent:
        sys.stderr.writelines(f"{remark}\n" for remark in checkpoint.remarks)
    if args.json:
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    elif args.quiet:
        sys.stdout.write(f"{args.target}\n")
    else:
        with_tokenizer = "with" if shown["tokenizer"] else "without"
        sys.stdout.write(
            f"Wrote {args.target}: {shown['model_type']}, {format_count(shown['params'])} "
            f"parameters in {shown['dtype']}, {format_bytes(shown['bytes'])}, {with_tokenizer} a "
            f"tokenizer, from {shown['from']}.\n"
        )


def _reader(source: Path) -> Any:
    if not source.exists():
        raise SpecError(
            f"No such file or folder: {source}. Give a run, a checkpoint, or a .gguf file."
        )
    if source.is_file():
        if source.suffix == ".gguf":
            return _from_gguf
        raise SpecError(f"{source} is not a .gguf file. Give a run, a checkpoint, or a .gguf file.")
    if (source / MANIFEST).exists():
        return _from_checkpoint
    if (source / _CHECKPOINTS).is_dir() or (source / RESOLVED).exists():
        return _from_run
    if (source / "config.json").exists():
        raise SpecError(
            f"{source} is a Hugging Face folder already. A run starts from it with "
            f'model.init = "hf:{source}".'
        )
    raise SpecError(
        f"{source} is neither a run (it has no {_CHECKPOINTS}/) nor a checkpoint (it has no "
        f"{MANIFEST}). Give one of them, or a .gguf file."
    )


def _from_run(run_folder: Path) -> _Loaded:
    root = run_folder / _CHECKPOINTS
    newest = newest_good(root)
    if newest is None:
        raise CheckpointError(
            f"{run_folder} has no checkpoint yet. Train it further; checkpoint.every_steps says "
            "how often one is written."
        )
    return _load_checkpoint(*newest)


def _from_checkpoint(folder: Path) -> _Loaded:
    return _load_checkpoint(folder, read_manifest(folder), [])


def _load_checkpoint(folder: Path, manifest: Any, torn: list[str]) -> _Loaded:
    from equipoise.checkpoint.export import read_checkpoint_weights

    model, state = read_checkpoint_weights(folder, manifest)
    remarks = [*torn]
    file = _corpus_tokenizer(folder.resolve().parent.parent)
    if file is None:
        remarks.append(
            f"No tokenizer for {folder}: its run's {RESOLVED} or its token cache is missing or "
            "damaged. Give one with --tokenizer."
        )
    return _Loaded(
        origin=folder,
        model=model,
        state=state,
        step=manifest.step,
        context_tokens=manifest.context_tokens,
        tokenizer_json=None if file is None else file.read_text(),
        tokenizer_config={} if file is None else {"eos_token": _end_of(file)},
        remarks=remarks,
    )


def _from_gguf(file: Path) -> _Loaded:
    from equipoise.nn.hf.gguf import read_gguf, read_gguf_header

    header = read_gguf_header(file)
    model, state, tokenizer_json = read_gguf(file)
    remarks = []
    if tokenizer_json is None:
        remarks.append(
            f"The tokenizer in {file} is not a byte-level BPE that can be read. Give the model's "
            "tokenizer.json with --tokenizer."
        )
    return _Loaded(
        origin=file,
        model=model,
        state=state,
        step=None,
        context_tokens=header.context_tokens,
        tokenizer_json=tokenizer_json,
        tokenizer_config=header.tokenizer_config,
        remarks=remarks,
    )


def _corpus_tokenizer(run_folder: Path) -> Path | None:
    from equipoise.data.cache.store import open_store
    from equipoise.spec.run.resolved import read_resolved

    try:
        return open_store(Path(read_resolved(run_folder).corpus)).tokenizer_file
    except (SpecError, DataError):
        return None


def _end_of(file: Path) -> str:
    from equipoise.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(file)
    return str(tokenizer.core.id_to_token(tokenizer.end))


def _tokenizer(
    given: Path | None, loaded: _Loaded, folder: Path
) -> tuple[Path | None, dict[str, str]]:
    """The tokenizer.json to copy, and its configuration."""
    if given is not None:
        return given, {"eos_token": _end_of(given)}
    if loaded.tokenizer_json is None:
        return None, {}
    file = folder / "tokenizer.json"
    file.write_text(loaded.tokenizer_json)
    return file, loaded.tokenizer_config
