"""Tokenize a corpus once, on every core, into a folder that every rank maps.

Why
    Tokens are read by each rank of each run, and made once. A run that is killed while they
    are made, or two runs that start together, must not leave half a cache that looks whole.

What it decides
    Where a cache lies and when it is good for a corpus: its name is the digest of the
    source's identity, the tokenizer's bytes and the format. And how it is built::

        tokens-<digest>.lock             held by the one process that builds
        tokens-<digest>.parts/           one file per shard, renamed when it is whole
        tokens-<digest>.building-<pid>/  all shards put together, then renamed to
        tokens-<digest>/                 tokens.bin offsets.npy origins.npy names.json
                                         tokenizer.json meta.json

    Whatever lies beside a lock that nobody holds was left by a kill: whole shards are used
    again, the rest is removed.

Kept true (tests/unit/data/test_store.py)
    Any number of workers, and any number of kills before, give the same bytes; a folder
    without a suffix is whole; a cache that is there is opened without reading the corpus.
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from equipoise.base.digest import digest, digest_file
from equipoise.base.errors import DataError
from equipoise.base.units import format_bytes
from equipoise.data.source import Shard, Source, open_source
from equipoise.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from equipoise.spec.run import DataSpec

# Part of every cache's name. Count it up when files are laid out, corpora divided into shards,
# or texts sampled in another way: a build may go on with the shards of an older version.
FORMAT = 1

# Leftovers of a build that was killed and never begun again are removed after this long.
_LEFTOVER_S = 86_400
# Text per token of the 4,096-token BPE on the standard library: 3.2 bytes. For estimates.
_BYTES_PER_TOKEN = 3
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UINT16_IDS = 1 << 16
# Starts a worker. multiprocessing's spawn would import the caller's main file again, and
# fail for a script without a main guard or one read from standard input.
_WORKER = (
    "import sys; sys.path[:] = {path!r}; from equipoise.data.store import work; work({handle})"
)


class Progress(Protocol):
    """Who shows how far a long action is. ``total`` and ``amount`` have one unit."""

    def start(self, label: str, total: int) -> None:
        """An action begins."""

    def advance(self, amount: int) -> None:
        """So much more of it is done."""

    def finish(self) -> None:
        """It ended, well or not."""


class SilentProgress:
    """Shows nothing."""

    def start(self, label: str, total: int) -> None:
        """Nothing."""

    def advance(self, amount: int) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


@dataclass(frozen=True, eq=False)
class TokenStore:
    """A corpus as tokens, mapped from a whole cache folder.

    ``tokens`` uint16 or uint32[tokens], every document followed by ``end``; document d is
    ``tokens[offsets[d]:offsets[d + 1]]`` and ``doc_tokens[d]`` long, end token included.
    ``origins`` int64[documents, 2] says the file of ``names`` and the row in it.
    """

    tokens: np.memmap[Any, np.dtype[np.unsignedinteger[Any]]] = field(repr=False)
    doc_tokens: NDArray[np.int64] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)
    origins: NDArray[np.int64] = field(repr=False)
    vocab: int
    end: int
    tokenizer_file: Path
    folder: Path
    digest: str
    source_name: str
    source_kind: str
    empty_documents: int
    undecodable_documents: int

    @property
    def documents(self) -> int:
        """Documents that count: not empty, and decodable."""
        return len(self.doc_tokens)

    @cached_property
    def names(self) -> list[str]:
        """The corpus' files, relative to its root."""
        return [str(name) for name in json.loads((self.folder / "names.json").read_text())]

    def name(self, document: int) -> str:
        """Where a document came from, for people: ``test/test_os.py``, ``a.parquet row 17``."""
        file, row = int(self.origins[document, 0]), int(self.origins[document, 1])
        names: list[str] = self.names
        if self.source_kind == "jsonl":
            return f"{names[file]} at byte {row:,}"
        if self.source_kind in ("parquet", "datasets"):
            return f"{names[file]} row {row:,}"
        return names[file]


def prepare(
    spec: DataSpec, base: Path, *, progress: Progress, workers: int | None = None
) -> TokenStore:
    """Open the token cache of a corpus; make it first, and its tokenizer, if there is none.

    Args:
        spec: The ``[data]`` table.
        base: Folder of run.toml, where relative paths start.
        progress: Is told of the training of the tokenizer and of the bytes tokenized.
        workers: Processes that tokenize; one for each core that this process may use unless
            given. With 1, or a single shard, it is done in this process.

    Raises:
        DataError: the corpus or the tokenizer is missing or wrong, the cache is damaged or
            cannot be made, or the disk is full.

    Cost: a cache that is there, a look at each file's size and time (0.02 s for 1,800
    files); else about 1 s of one core for 3 MB of text.
    """
    cache = base / Path(spec.cache).expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache {cache} cannot be made: {error.strerror}. Set data.cache to a folder that "
            "may be written."
        ) from None
    source = open_source(spec, base)
    if spec.tokenizer == "train":
        tokenizer_file = _trained(source, spec.vocab, cache, progress)
    else:
        tokenizer_file = base / Path(spec.tokenizer).expanduser()
        if not tokenizer_file.is_file():
            load_tokenizer(tokenizer_file)  # says what is wrong
    name = digest([FORMAT, source.digest, digest_file(tokenizer_file)])
    folder = cache / f"tokens-{name}"
    with _make_once(folder, progress) as is_wanted:
        if is_wanted:
            _build(source, tokenizer_file, folder, progress, workers or _cores())
    return open_store(folder)


def open_store(folder: Path) -> TokenStore:
    """Map a token cache that ``prepare`` made.

    Raises:
        DataError: the folder is missing, of another format, or its files are not as long as
            meta.json says.
    """
    meta_file = folder / "meta.json"
    if not meta_file.is_file():
        raise DataError(
            f"{folder} is no token cache: it has no meta.json. Delete the folder; the next run "
            "makes it again."
        )
    meta = json.loads(meta_file.read_text())
    if meta["format"] != FORMAT:
        raise DataError(
            f"{folder} is a token cache of format {meta['format']}, and this version reads "
            f"{FORMAT}. Delete the folder; the next run makes it again."
        )
    documents, tokens, dtype = meta["documents"], meta["tokens"], np.dtype(meta["dtype"])
    for name, size_bytes in meta["sizes_bytes"].items():
        path = folder / name
        found_bytes = path.stat().st_size if path.is_file() else 0
        if found_bytes != size_bytes:
            raise DataError(
                f"{path} has {found_bytes:,} bytes where meta.json says {size_bytes:,}. Delete "
                f"the folder {folder}; the next run makes it again."
            )
    offsets = np.load(folder / "offsets.npy", mmap_mode="r")
    return TokenStore(
        tokens=np.memmap(folder / "tokens.bin", dtype=dtype, mode="r", shape=(tokens,)),
        doc_tokens=np.diff(offsets),
        offsets=offsets,
        origins=np.load(folder / "origins.npy", mmap_mode="r").reshape(documents, 2),
        vocab=meta["vocab"],
        end=meta["end"],
        tokenizer_file=folder / "tokenizer.json",
        folder=folder,
        digest=meta["digest"],
        source_name=meta["source_name"],
        source_kind=meta["source_kind"],
        empty_documents=meta["empty_documents"],
        undecodable_documents=meta["undecodable_documents"],
    )


# Who builds, and what a kill leaves behind. -----------------------------------------------


def _leftovers(target: Path) -> list[Path]:
    return [
        *target.parent.glob(f"{target.name}.building-*"),
        *target.parent.glob(f"{target.name}.parts*"),
    ]


def _parts_folder(target: Path) -> Path:
    return target.with_name(f"{target.name}.parts")


def _building(target: Path) -> Path:
    return target.with_name(f"{target.name}.building-{os.getpid()}")


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # Renamed first: a worker whose parent was killed may still be about to put a file there.
    doomed = path if ".building-" in path.name else path.replace(_building(path))
    shutil.rmtree(doomed, ignore_errors=True)


def _take(lock: Path, *, block: bool) -> int | None:
    """The lock's file descriptor, or None where another process holds it."""
    while True:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if block else fcntl.LOCK_NB))
            # Its last holder may have removed the file while this process waited for it.
            if lock.exists() and os.path.samestat(lock.stat(), os.fstat(handle)):
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextmanager
def _make_once(target: Path, progress: Progress) -> Iterator[bool]:
    """Be the one process that makes ``target``, unless it is there; says whether to make it.

    A kill lets go of the lock and leaves its file, by which leftovers are known.
    """
    lock = target.with_name(f"{target.name}.lock")
    if target.exists() and not lock.exists():
        yield False
        return
    _sweep(target.parent)
    handle = _take(lock, block=False)
    if handle is None:
        progress.start(f"wait for another process that builds {target.name}", 1)
        try:
            handle = _take(lock, block=True)
        finally:
            progress.finish()
    try:
        is_wanted = not target.exists()
        if not is_wanted:
            for path in _leftovers(target):
                _remove(path)
        yield is_wanted
    finally:
        # The lock file stays beside what a later build can use, for _sweep to find.
        if not _leftovers(target):
            lock.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)


def _sweep(cache: Path) -> None:
    """Remove what killed builds left a day ago and nobody came back to."""
    for lock in cache.glob("*.lock"):
        try:
            is_old = time.time() - lock.stat().st_mtime > _LEFTOVER_S
        except FileNotFoundError:
            continue
        if is_old and (handle := _take(lock, block=False)) is not None:
            for path in _leftovers(lock.with_suffix("")):
                _remove(path)
            lock.unlink()
            os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _clean_if_full(source: Source, target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free_bytes = shutil.disk_usage(target.parent).free
        for path in _leftovers(target):
            _remove(path)
        # Shards and the whole lie side by side for a moment, hence twice.
        need_bytes = 2 * 2 * source.size_bytes // _BYTES_PER_TOKEN
        raise DataError(
            f"The disk of data.cache {target.parent} is full: {format_bytes(free_bytes)} were left "
            f"while {target.name} was built, which takes about {format_bytes(need_bytes)} in all. "
            "Free some space, or set data.cache to a folder on a larger disk."
        ) from None


# The build. -------------------------------------------------------------------------------


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _no_text(source: Source) -> DataError:
    return DataError(
        f"data.path {source.root} holds no text: its {len(source.names):,} files have "
        f"{source.size_bytes:,} bytes and no document that is not empty. Set data.path to a corpus "
        "with text in it."
    )


def _trained(source: Source, vocab: int, cache: Path, progress: Progress) -> Path:
    file = cache / f"tokenizer-{digest([FORMAT, source.digest, vocab])}.json"
    with _make_once(file, progress) as is_wanted, _clean_if_full(source, file):
        if is_wanted:
            for path in _leftovers(file):
                _remove(path)
            progress.start("train tokenizer", 1)
            try:
                if next(source.sample(), None) is None:
                    raise _no_text(source)
                train_tokenizer(source.sample(), vocab, file)
                progress.advance(1)
            finally:
                progress.finish()
    return file


def _build(
    source: Source, tokenizer_file: Path, folder: Path, progress: Progress, workers: int
) -> None:
    parts = _parts_folder(folder)
    tokenizer = load_tokenizer(tokenizer_file)
    with _clean_if_full(source, folder):
        for path in _leftovers(folder):
            if path != parts:
                _remove(path)
        parts.mkdir(exist_ok=True)
        for path in parts.glob("*.building-*"):
            _remove(path)
        shards = source.shards()
        files = [parts / f"shard-{index:06d}" for index in range(len(shards))]
        progress.start(f"tokenize {source.name}", sum(shard.size_bytes for shard in shards))
        try:
            todo = []
            for shard, file in zip(shards, files, strict=True):
                if _shard_sizes(file, _dtype(tokenizer.vocab)) is None:
                    todo.append((shard, file))
                else:
                    progress.advance(shard.size_bytes)
            if min(workers, len(todo)) > 1:
                _tokenize_parallel(todo, tokenizer_file, progress, min(workers, len(todo)))
            else:
                for shard, file in todo:
                    _tokenize(shard, tokenizer, file)
                    progress.advance(shard.size_bytes)
        finally:
            progress.finish()
        made = [_shard_sizes(file, _dtype(tokenizer.vocab)) for file in files]
        if not any(sizes.documents for sizes in made if sizes is not None):
            _remove(parts)
            raise _no_text(source)
        building = _building(folder)
        try:
            _assemble(source, tokenizer, files, building, folder.name.removeprefix("tokens-"))
            building.rename(folder)
            _sync(folder.parent)
        except BaseException:
            _remove(building)
            if not folder.exists():  # else a process that the lock does not reach was faster
                raise
        _remove(parts)


def _dtype(vocab: int) -> "np.dtype[np.unsignedinteger[Any]]":
    return np.dtype("<u2" if vocab <= _UINT16_IDS else "<u4")


def _tokenize(shard: Shard, tokenizer: Tokenizer, file: Path) -> None:
    """Write one shard's file: a header, lengths and origins of documents, all tokens."""
    dtype = _dtype(tokenizer.vocab)
    runs, origins = [], []
    empty = undecodable = 0
    for document in shard.documents():
        if document.text:
            tokens = tokenizer.encode(document.text)
            runs.append(np.append(tokens, tokenizer.end).astype(dtype))
            origins.append((document.file, document.row))
        elif document.text is None:
            undecodable += 1
        else:
            empty += 1
    doc_tokens = np.array([len(run) for run in runs], dtype="<i8")
    header = np.array([FORMAT, len(runs), doc_tokens.sum(), empty, undecodable], dtype="<i8")
    building = _building(file)
    with building.open("wb") as out:
        out.write(header.tobytes())
        out.write(doc_tokens.tobytes())
        out.write(np.array(origins, dtype="<i8").tobytes())
        for run in runs:
            out.write(run.tobytes())
        out.flush()
        os.fsync(out.fileno())
    building.replace(file)


_HEADER_BYTES = 5 * 8


class _ShardSizes(NamedTuple):
    documents: int
    tokens: int
    empty: int
    undecodable: int


def _shard_sizes(file: Path, dtype: "np.dtype[np.unsignedinteger[Any]]") -> _ShardSizes | None:
    """What the header of a shard's file counts; None if the file is not whole."""
    if not file.is_file() or (size_bytes := file.stat().st_size) < _HEADER_BYTES:
        return None
    made, documents, tokens, empty, undecodable = np.fromfile(file, "<i8", count=5).tolist()
    whole_bytes = _HEADER_BYTES + documents * 3 * 8 + tokens * dtype.itemsize
    if made != FORMAT or size_bytes != whole_bytes:
        return None
    return _ShardSizes(documents, tokens, empty, undecodable)


def _assemble(
    source: Source, tokenizer: Tokenizer, files: list[Path], building: Path, name: str
) -> None:
    """Put the shards together into one folder, and its meta.json last."""
    dtype = _dtype(tokenizer.vocab)
    building.mkdir()
    lengths, origins = [], []
    empty = undecodable = 0
    with (building / "tokens.bin").open("wb") as out:
        for file in files:
            sizes = _shard_sizes(file, dtype)
            if sizes is None:
                raise DataError(
                    f"{file} was changed while the token cache was built. Start the run again."
                )
            with file.open("rb") as part:
                part.seek(_HEADER_BYTES)
                lengths.append(_read_int64(part, sizes.documents))
                origins.append(_read_int64(part, 2 * sizes.documents).reshape(-1, 2))
                shutil.copyfileobj(part, out, 1 << 20)
            empty += sizes.empty
            undecodable += sizes.undecodable
    doc_tokens = np.concatenate(lengths)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(doc_tokens)])
    np.save(building / "offsets.npy", offsets)
    np.save(building / "origins.npy", np.concatenate(origins))
    (building / "names.json").write_text(json.dumps(source.names))
    shutil.copyfile(tokenizer.file, building / "tokenizer.json")
    written = sorted(building.iterdir())
    meta = {
        "format": FORMAT,
        "digest": name,
        "source_name": source.name,
        "source_kind": source.kind,
        "source_digest": source.digest,
        "tokenizer_digest": tokenizer.digest,
        "vocab": tokenizer.vocab,
        "end": tokenizer.end,
        "dtype": dtype.str,
        "documents": len(doc_tokens),
        "tokens": int(offsets[-1]),
        "empty_documents": empty,
        "undecodable_documents": undecodable,
        "sizes_bytes": {path.name: path.stat().st_size for path in written},
    }
    (building / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    for path in (*written, building / "meta.json", building):
        _sync(path)


def _read_int64(file: BinaryIO, count: int) -> NDArray[np.int64]:
    return np.frombuffer(file.read(count * 8), dtype="<i8")


# The workers. -----------------------------------------------------------------------------


def _tokenize_parallel(
    todo: list[tuple[Shard, Path]], tokenizer_file: Path, progress: Progress, workers: int
) -> None:
    """Deal shards to worker processes, the next to whoever is done."""
    with ExitStack() as stack:
        crew = {}
        for _ in range(workers):
            connection, process = _hire()
            stack.callback(_dismiss, connection, process)
            crew[connection] = process
            with suppress(BrokenPipeError):  # a dead worker is met when its answer is read
                connection.send(tokenizer_file)
        waiting = iter(todo)
        busy: dict[Connection, Shard] = {}

        def deal(connection: Connection) -> None:
            if (task := next(waiting, None)) is not None:
                busy[connection] = task[0]
                with suppress(BrokenPipeError):
                    connection.send(task)

        for connection in crew:
            deal(connection)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)  # noqa: S101 - wait() returns what it got
                try:
                    error = ready.recv()
                    if error is not None:
                        raise error
                    progress.advance(busy.pop(ready).size_bytes)
                    deal(ready)
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    raise DataError(
                        f"A worker that tokenized {busy[ready].parts[0].name} died with exit code "
                        f"{crew[ready].wait()}; -9 mostly means that memory ran out. Run again: "
                        "finished shards are kept."
                    ) from None


def _hire() -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = Pipe()
    with theirs:
        code = _WORKER.format(path=sys.path, handle=theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                # One core each, and none of the library's words about threads and forks.
                "TOKENIZERS_PARALLELISM": "false",
                "RAYON_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
    return ours, process


def _dismiss(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()


def work(handle: int) -> None:
    """Be a worker: tokenize what comes over the pipe until its other end is gone.

    The pipe ends when the parent does, by whatever death, so no worker outlives its parent
    by more than one shard.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    with Connection(handle) as parent:
        try:
            tokenizer = load_tokenizer(parent.recv())
            while True:
                shard, file = parent.recv()
                try:
                    _tokenize(shard, tokenizer, file)
                except Exception as error:
                    parent.send(error)
                else:
                    parent.send(None)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
