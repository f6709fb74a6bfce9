"""A token cache that is not as it was written is never read without a word."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.base.digest import digest_bytes
from equipoise.base.errors import DataError
from equipoise.data.batch import make_batch
from equipoise.data.cache import meta as cache_meta
from equipoise.data.cache.meta import read_meta, render
from equipoise.data.cache.store import TokenStore, open_store, prepare
from equipoise.data.cache.verified import ChunkTable
from equipoise.data.progress import SilentProgress
from equipoise.spec.pack import MicroBatch
from equipoise.spec.run.spec import DataSpec

SILENT = SilentProgress()
AGAIN = "Delete the folder {folder}; the next run makes it again."


@pytest.fixture
def copy(store: TokenStore, tmp_path: Path) -> Path:
    """A copy of the cache, which may be damaged."""
    return Path(shutil.copytree(store.folder, tmp_path / store.folder.name))


def read_all(folder: Path) -> None:
    """Open a cache and read each of its documents as training does."""
    store = open_store(folder)
    for document in range(store.documents):
        pieces = np.array([[document, 0, int(store.doc_tokens[document])]])
        make_batch(store, MicroBatch(pieces), torch.device("cpu"))


def rewrite(folder: Path, tokens: np.ndarray, **changes: object) -> None:
    """Put other tokens into a cache, with digests that are right for them."""
    data = tokens.tobytes()
    table = ChunkTable()
    table.update(data)
    (folder / "tokens.bin").write_bytes(data)
    (folder / "tokens.digests").write_bytes(table.finish())
    meta = dataclasses.replace(read_meta(folder), files=cache_meta.describe(folder), **changes)
    (folder / "meta.json").write_text(render(meta))


def spec_of(corpus: Path, cache: Path, tokenizer: Path | str) -> DataSpec:
    return DataSpec(
        source="text", path=str(corpus), vocab=400, cache=str(cache), tokenizer=str(tokenizer)
    )


FILES = (
    "meta.json",
    "names.json",
    "offsets.bin",
    "origins.bin",
    "tokenizer.json",
    "tokens.bin",
    "tokens.digests",
)


def test_these_are_all_files_of_a_cache(copy: Path) -> None:
    assert sorted(path.name for path in copy.iterdir()) == list(FILES)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found_and_its_file_named(copy: Path, name: str) -> None:
    # Two bytes at each end, and of each eighth of the file; every bit of them.
    whole = (copy / name).read_bytes()
    draw = random.Random(name)
    edges = [round(eighth * (len(whole) - 1) / 8) for eighth in range(9)]
    places = {0, 1, len(whole) - 2, len(whole) - 1, *edges, *draw.sample(range(len(whole)), 8)}
    passed = []
    for at in sorted(places):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            (copy / name).write_bytes(damaged)
            try:
                open_store(copy).verify()
            except DataError as error:
                text = str(error)
                assert str(copy / name) in text or (name == "meta.json" and str(copy) in text)
                assert text.endswith("; the next run makes it again.")
            else:
                passed.append((at, bit))
    assert passed == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "grow", "empty", "remove", "swap"])
def test_a_file_of_another_length_or_of_another_cache_is_found(
    copy: Path, store: TokenStore, tmp_path: Path, name: str, damage: str
) -> None:
    file = copy / name
    whole = file.read_bytes()
    if damage == "remove":
        file.unlink()
    elif damage == "swap":
        (tmp_path / "other.txt").write_text("some other text, and not much of it")
        spec = spec_of(tmp_path / "other.txt", tmp_path / "cache", "train")
        shutil.copyfile(prepare(spec, tmp_path, progress=SILENT).folder / name, file)
    else:
        file.write_bytes({"cut": whole[:-1], "grow": whole + b"\0", "empty": b""}[damage])
    with pytest.raises(DataError) as caught:
        read_all(copy)
    assert str(caught.value).startswith(f"{copy}")
    assert str(caught.value).endswith("; the next run makes it again.")


def test_training_reads_what_was_written_or_nothing(copy: Path, store: TokenStore) -> None:
    read_all(copy)
    for at in np.linspace(0, len(store.tokens) - 1, 12).astype(int):
        data = bytearray((store.folder / "tokens.bin").read_bytes())
        data[2 * at] ^= 1
        (copy / "tokens.bin").write_bytes(data)
        document = int(np.searchsorted(store.offsets, at, side="right")) - 1
        pieces = np.array([[document, 0, int(store.doc_tokens[document])]])
        with pytest.raises(DataError, match=r"tokens\.bin is damaged: bytes "):
            make_batch(open_store(copy), MicroBatch(pieces), torch.device("cpu"))


def test_other_tokens_with_digests_of_their_own_have_another_digest(
    copy: Path, store: TokenStore
) -> None:
    assert open_store(copy).digest == store.digest
    rewrite(copy, store.tokens[:][::-1].copy())
    assert open_store(copy).digest != store.digest


def test_the_same_corpus_elsewhere_and_later_has_the_same_digest(
    store: TokenStore, corpus: Path, tmp_path: Path
) -> None:
    for path in corpus.rglob("*"):
        if path.is_file():
            target = tmp_path / "texts" / path.relative_to(corpus)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    spec = spec_of(tmp_path / "texts", tmp_path / "cache", store.tokenizer_file)
    again = prepare(spec, tmp_path, progress=SILENT, workers=1)
    assert again.folder.name != store.folder.name  # files have other times
    assert again.digest == store.digest


def test_a_token_beyond_the_vocabulary_names_its_document(
    message, copy: Path, store: TokenStore
) -> None:
    tokens = store.tokens[:].copy()
    tokens[int(store.offsets[7]) + 2] = 400
    rewrite(copy, tokens)
    text = (
        f"Document 7 ({store.name(7)}) has token 400, but its tokenizer has only 400. Delete the "
        f"folder {copy}; the next run makes it again."
    )
    assert message(DataError, read_all, copy) == text
    assert message(DataError, open_store(copy).verify) == text


def test_a_cache_under_the_name_of_another(message, copy: Path, tmp_path: Path) -> None:
    other = copy.rename(tmp_path / f"tokens-{'0' * 32}")
    assert message(DataError, open_store, other) == (
        f"{other}/meta.json is damaged: it belongs to another corpus or tokenizer, {copy.name}. "
        f"Delete the folder {other}; the next run makes it again."
    )


@pytest.mark.parametrize("changes", [{"documents": 3}, {"tokens": 7}, {"dtype": "<u4"}])
def test_sizes_that_do_not_go_together(message, copy: Path, changes: dict) -> None:
    meta = read_meta(copy)
    (copy / "meta.json").write_text(render(dataclasses.replace(meta, **changes)))
    assert message(DataError, open_store, copy) == (
        f"{copy}/meta.json is damaged: it does not match the other files. "
        + AGAIN.format(folder=copy)
    )


UNREADABLE = """
import mmap, os  # NumPy would import it later, as the other user
from pathlib import Path
from equipoise.base.errors import DataError
from equipoise.data.cache.store import open_store
os.chmod({file!r}, 0)
os.setuid(65534)
try:
    open_store(Path({folder!r}))
except DataError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="root alone becomes another user")
@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin"])
def test_a_file_that_may_not_be_read(copy: Path, name: str) -> None:
    for folder in copy.parents:
        if folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(0o755)
    code = UNREADABLE.format(file=str(copy / name), folder=str(copy))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == (
        f"{copy} cannot be read (Permission denied). Make its files readable, or delete the "
        "folder; the next run makes it again.\n"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", '{"format": 2}', "[" * 100_000, "\xff"])
def test_a_meta_that_is_none(message, copy: Path, text: str) -> None:
    (copy / "meta.json").write_text(text, encoding="latin-1")
    assert message(DataError, open_store, copy) == (
        f"{copy}/meta.json is damaged: its bytes have changed since it was written. "
        + AGAIN.format(folder=copy)
    )


def test_a_damaged_cache_is_made_again_as_it_was(corpus: Path, store: TokenStore, tmp_path: Path):
    spec = spec_of(corpus / "json", tmp_path / "cache", store.tokenizer_file)
    first = prepare(spec, tmp_path, progress=SILENT)
    known = first.digest
    with (first.folder / "tokens.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(DataError, match=r"tokens\.bin is damaged"):
        prepare(spec, tmp_path, progress=SILENT).verify()
    shutil.rmtree(first.folder)
    again = prepare(spec, tmp_path, progress=SILENT)
    again.verify()
    assert again.digest == known


def test_a_trained_tokenizer_is_verified(message, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus / "json", tmp_path / "cache", "train")
    prepare(spec, tmp_path, progress=SILENT)
    (folder,) = (tmp_path / "cache").glob("tokenizer-*")
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole.replace(b"se", b"es"))
    assert message(DataError, prepare, spec, tmp_path, progress=SILENT) == (
        f"{folder}/tokenizer.json is damaged: its bytes have changed since it was written. "
        + AGAIN.format(folder=folder)
    )
    shutil.rmtree(folder)
    prepare(spec, tmp_path, progress=SILENT)
    assert (folder / "tokenizer.json").read_bytes() == whole


# A build that goes on with what a kill left. ---------------------------------------------------

KILLED = """
import os, signal
from pathlib import Path
from equipoise.data.cache import build, store
from equipoise.data.progress import SilentProgress
from equipoise.spec.run.spec import DataSpec
build.assemble = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store.prepare({spec!r}, Path("/"), progress=SilentProgress(), workers=1)
"""


@pytest.fixture(scope="module")
def killed(corpus: Path, store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with all shards of a build that was killed before they were put together."""
    cache = tmp_path_factory.mktemp("killed") / "cache"
    spec = spec_of(corpus, cache, store.tokenizer_file)
    done = subprocess.run([sys.executable, "-c", KILLED.format(spec=spec)])
    assert done.returncode == -signal.SIGKILL
    return cache


@pytest.fixture
def left(killed: Path, corpus: Path, store: TokenStore, tmp_path: Path) -> tuple[DataSpec, Path]:
    """A copy of what the killed build left: its cache, and the folder of its shards."""
    cache = Path(shutil.copytree(killed, tmp_path / "cache"))
    (parts,) = cache.glob("*.parts")
    return spec_of(corpus, cache, store.tokenizer_file), parts


@pytest.mark.long
@pytest.mark.parametrize("damage", ["flip", "swap", "cut", "other-place"])
def test_shards_that_a_kill_left_and_something_changed_are_made_again(
    left: tuple[DataSpec, Path], store: TokenStore, tmp_path: Path, damage: str
) -> None:
    spec, parts = left
    first, second, third = sorted(parts.iterdir())[:3]
    if damage == "flip":
        for at in (0, 8, 16, 24, 45, 3000, first.stat().st_size - 20, first.stat().st_size - 1):
            data = bytearray(third.read_bytes())
            data[at % len(data)] ^= 4
            third.write_bytes(data)
    elif damage == "swap":
        first.rename(parts / "x")
        second.rename(first)
        (parts / "x").rename(second)
    elif damage == "cut":
        os.truncate(first, first.stat().st_size - 1)
    else:
        shutil.copyfile(third, first)
    again = prepare(spec, tmp_path, progress=SILENT, workers=1)
    again.verify()
    assert again.digest == store.digest
    assert digest_bytes(again.tokens[:].tobytes()) == digest_bytes(store.tokens[:].tobytes())


def test_shards_of_another_tokenizer_are_made_again(
    left: tuple[DataSpec, Path], store: TokenStore, corpus: Path, tmp_path: Path
) -> None:
    """Ids of the old tokenizer are in the new one's range: nothing else would tell."""
    _, parts = left
    core = json.loads(store.tokenizer_file.read_text())
    vocab = core["model"]["vocab"]
    low, high = "a", "b"
    vocab[low], vocab[high] = vocab[high], vocab[low]
    (tmp_path / "other.json").write_text(json.dumps(core))
    spec = spec_of(corpus, tmp_path / "cache", tmp_path / "other.json")
    apart = prepare(
        dataclasses.replace(spec, cache=str(tmp_path / "apart")), tmp_path, progress=SILENT
    )
    parts.rename(parts.with_name(f"{apart.folder.name}.parts"))
    assert prepare(spec, tmp_path, progress=SILENT).digest == apart.digest


def test_a_cache_of_an_earlier_version_is_made_again_and_said(
    corpus: Path, store: TokenStore, tmp_path: Path
) -> None:
    said: list[str] = []

    class Heard(SilentProgress):
        def start(self, label: str, total: int) -> None:
            said.append(label)

    spec = spec_of(corpus / "json", tmp_path / "cache", store.tokenizer_file)
    first = prepare(spec, tmp_path, progress=SILENT)
    shutil.rmtree(first.folder)
    (tmp_path / "cache" / f"tokens-{first.first_digest}").mkdir()
    prepare(spec, tmp_path, progress=Heard())
    assert said == ["tokenize text:json again (the cache of an earlier version has no digests)"]
