"""``equipoise init``: a commented run.toml to start from."""

import argparse
import json
import os
import sys
from pathlib import Path

from equipoise.base.errors import SpecError

HELP = "write a commented run.toml to start from"

EXAMPLES = """\
examples:
  equipoise init                                      ./run.toml, on this Python's own library
  equipoise init story --from text --path books       story/run.toml, on a folder of text files
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
        metavar="SOURCE",
        help="data.source: python-stdlib, python-functions, text, jsonl, parquet or datasets",
    )
    parser.add_argument(
        "--path", type=Path, metavar="PATH", help="data.path: the file or folder to train on"
    )
    parser.add_argument("--preset", metavar="NAME", help="model.preset")
    parser.add_argument("--name", metavar="NAME", help="the run's name")


def run(args: argparse.Namespace) -> int:
    """Write DIR/run.toml."""
    from equipoise.spec.run.load import read_run, template
    from equipoise.spec.run.spec import PYTHON_SOURCES

    if args.path is not None and not args.path.exists():
        raise SpecError(f"No such file or folder: {args.path}. Give --path one that exists.")
    if args.source not in (None, *PYTHON_SOURCES) and args.path is None:
        raise SpecError(f"--from {args.source} needs --path, the file or folder to train on.")
    if args.path is not None and args.source is None:
        raise SpecError("--path needs --from, the kind of data: text, jsonl, parquet or datasets.")
    wanted = [
        ("name", args.name),
        ("data.source", args.source),
        ("data.path", None if args.path is None else _beside(args.path, args.folder)),
        ("model.preset", args.preset),
    ]
    text = template(read_run(None, [(key, value) for key, value in wanted if value is not None]))
    file: Path = args.folder / "run.toml"
    _write_new(file, text)
    if args.json:
        sys.stdout.write(json.dumps({"run_toml": str(file)}) + "\n")
    elif not args.quiet:
        sys.stdout.write(
            f"Wrote {file}. See what it says: equipoise config {file}. "
            f"Train: equipoise train {file}\n"
        )
    return 0


def _beside(path: Path, folder: Path) -> str:
    """``path`` as the run.toml in ``folder`` must name it; an absolute path stays as it is."""
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


def _write_new(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
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
