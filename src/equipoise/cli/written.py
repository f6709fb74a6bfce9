"""Refusals of a file that a verb is to write, before the verb computes anything for it.

Kept true (tests/unit/cli/pack/test_verb.py)
    A name of another kind and a folder that is not there are refused before anything is computed.
"""

from pathlib import Path
from tempfile import TemporaryFile

from equipoise.base.errors import SpecError
from equipoise.base.read import DESCRIPTORS, real_path

_KINDS = {"picture": (".png", ".svg", ".pdf"), "trace": (".json",)}


def require_kind(flag: str, file: Path | None, what: str) -> None:
    """Refuse a name that does not end as a picture's or a trace's.

    Args:
        flag: Of the command line, without its dashes.
        file: What it was given, if it was.
        what: ``picture`` or ``trace``.

    Raises:
        SpecError: with the endings, and a name that would do.
    """
    *some, last = _KINDS[what]
    if file is None or file.suffix in (*some, last):
        return
    said = f"{', '.join(some)} or {last}" if some else last
    better = (file if file.name else Path(what)).with_suffix(_KINDS[what][0])
    raise SpecError(
        f'--{flag} {file}: a {what}\'s name ends in {said}, not "{file.suffix}". Try {better}.'
    )


def require_folder_of(flag: str, file: Path | None) -> None:
    """Refuse a file whose folder is not there, and a folder or an idle pipe in a file's place.

    Raises:
        SpecError: names the folder, or says what is in the file's place.
    """
    if file is not None and not file.parent.is_dir():
        raise SpecError(f"--{flag} {file}: there is no folder {file.parent}. Create it first.")
    if file is not None and file.is_dir():
        raise SpecError(f"--{flag} {file} is a folder. Give a file in it.")
    # A shell's >(...) is a pipe that has a reader.
    if file is not None and file.is_fifo() and not str(file).startswith(DESCRIPTORS):
        raise SpecError(f"--{flag} {file} is a pipe, which may have no reader. Give a file.")
    if file is not None and not file.exists():
        require_writable(flag, file.parent)


def require_writable(flag: str, folder: Path) -> None:
    """Refuse a folder in which no file can be made, by making one that has no name.

    Raises:
        SpecError: with the system's reason.
    """
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise SpecError(
            f"--{flag}: no file can be written in {folder}: {why}. Give one in another folder."
        ) from None


def require_not_of_run(flag: str, file: Path | None, run: Path) -> None:
    """Refuse a file of a run, such as a journal; pages and traces of earlier calls are replaced.

    Raises:
        SpecError: names the run.
    """
    if file is None or not file.exists():
        return
    place, folder = real_path(file), real_path(run)
    is_ours = file.suffix == ".html" or (folder / "trace") in place.parents
    if folder in place.parents and not is_ours:
        raise SpecError(f"--{flag} {file} is a file of the run {run}. Give another file.")
