"""``equipoise init``: a commented run.toml to start from."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from equipoise.base.errors import SpecError
from equipoise.cli.console import make_progress

if TYPE_CHECKING:
    from equipoise.spec.run.resolve import ResolvedRun

HELP = "write a commented run.toml to start from"

EXAMPLES = """\
examples:
  equipoise init                                      ./run.toml, on this Python's own library
  equipoise init story --from books                   story/run.toml, on a folder of text files
  equipoise init chat --from chat.jsonl --model smollm2     fine-tune a model on conversations
  equipoise init more --from corpus.parquet --model smollm2
  equipoise init big --preset 120m --name big
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), metavar="DIR", help="where (default: here)"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="PATH",
        help="a corpus to look at (a file or a folder of text, JSON lines, Parquet or datasets), "
        "or a model's folder; or with --path, data.source",
    )
    parser.add_argument(
        "--path", type=Path, metavar="PATH", help="data.path: the file or folder to train on"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="the Hugging Face folder to begin with"
    )
    parser.add_argument("--preset", metavar="NAME", help="model.preset")
    parser.add_argument("--name", metavar="NAME", help="the run's name")


def run(args: argparse.Namespace) -> int:
    """Write DIR/run.toml."""
    from equipoise.cli.init_keys import HF, Seen, is_model, require_model, see
    from equipoise.spec.run.load import read_run, template
    from equipoise.spec.run.spec import Source

    file: Path = args.folder / "run.toml"
    _require_free(file)
    kinds = get_args(Source)
    model, seen = args.model, Seen()
    if args.source is None or args.source in kinds:
        _judge_kind(args)
        seen.keys += [("data.source", args.source)] if args.source else []
        seen.keys += [("data.path", str(args.path))] if args.path else []
    elif args.path is not None:
        raise SpecError(
            f"--from {args.source} is not a kind of data. With --path give one of "
            f"{', '.join(kinds)}; without it --from looks at a path."
        )
    elif is_model(Path(args.source)) and model is None:
        model = Path(args.source)
    else:
        seen = see(Path(args.source), model, make_progress(args.quiet or args.json))
    if model is not None:
        require_model(model, args.preset)
        seen.keys.append(("model.init", f"{HF}{model}"))
    given = [("name", args.name), ("model.preset", args.preset)]
    wanted = [*((key, value) for key, value in given if value is not None), *seen.keys]
    _write_new(file, template(_beside(read_run(None, wanted), args.folder)))
    if args.json:
        sys.stdout.write(json.dumps({"run_toml": str(file), "seen": seen.sentences}) + "\n")
    elif not args.quiet:
        name = shlex.quote(str(file))
        sys.stdout.writelines(f"{sentence}\n" for sentence in seen.sentences)
        sys.stdout.write(
            f"Wrote {file}. See what it says: equipoise config {name}. "
            f"Train: equipoise train {name}\n"
        )
    return 0


def _judge_kind(args: argparse.Namespace) -> None:
    """Refuse a kind of data without its path, and a path without its kind."""
    from equipoise.spec.run.spec import PYTHON_SOURCES

    if args.path is not None and not args.path.exists():
        raise SpecError(f"No such file or folder: {args.path}. Give --path one that exists.")
    if args.source not in (None, *PYTHON_SOURCES) and args.path is None:
        raise SpecError(f"--from {args.source} needs --path, the file or folder to train on.")
    if args.path is not None and args.source is None:
        raise SpecError("--path needs --from, the kind of data: text, jsonl, parquet or datasets.")


def _beside(run: "ResolvedRun", folder: Path) -> "ResolvedRun":
    """The run as the run.toml in ``folder`` must write it; absolute paths stay as they are."""
    import dataclasses

    from equipoise.cli.init_keys import HF
    from equipoise.spec.run.keys import DEFAULT
    from equipoise.spec.run.spec import DataSpec

    data, model = run.spec.data, run.spec.model
    origins = dict(run.origins)
    if data.path:
        data = dataclasses.replace(data, path=_path_from(data.path, folder))
    if model.init.startswith(HF):
        own = model.init.removeprefix(HF)
        model = dataclasses.replace(model, init=HF + _path_from(own, folder))
        if not origins["data.tokenizer"].startswith("--"):  # the folder's own, without a word
            data = dataclasses.replace(data, tokenizer=DataSpec().tokenizer)
            origins["data.tokenizer"] = DEFAULT.label
    spec = dataclasses.replace(run.spec, data=data, model=model)
    return dataclasses.replace(run, spec=spec, origins=origins)


def _path_from(path: str, folder: Path) -> str:
    return path if Path(path).is_absolute() else os.path.relpath(path, folder)


def _require_free(file: Path) -> None:
    if file.exists():
        raise SpecError(
            f"{file} already exists and was not changed. "
            "Give another folder (equipoise init DIR), or remove the file first."
        )


def _write_new(file: Path, text: str) -> None:
    if file.parent.exists() and not file.parent.is_dir():
        raise SpecError(f"{file.parent} is not a folder. Give another: equipoise init DIR.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream, _removing_if_torn(file):
            stream.write(text)
            stream.flush()
    except FileExistsError:
        raise SpecError(
            f"{file} already exists and was not changed. "
            "Give another folder (equipoise init DIR), or remove the file first."
        ) from None
    except OSError as error:
        raise SpecError(
            f"Cannot write {file}: {(error.strerror or str(error)).lower()}. "
            "Give a folder that you may write to: equipoise init DIR."
        ) from None


@contextmanager
def _removing_if_torn(file: Path) -> Iterator[None]:
    """A new file that cannot be written whole does not stay."""
    try:
        yield
    except OSError:
        file.unlink(missing_ok=True)
        raise
