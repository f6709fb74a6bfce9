"""The token cache: same bytes however it is built, whole or not there, opened at once."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import DataError
from equipoise.data.cache import build, once, workers
from equipoise.data.cache.store import TokenStore, open_store, prepare
from equipoise.data.progress import SilentProgress
from equipoise.data.source import open_source
from equipoise.data.text.tokenizer import load_tokenizer
from equipoise.launch.still import is_stopped
from equipoise.spec.run.spec import DataSpec
from support.verbs import wait_until

SILENT = SilentProgress()


class Heard:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.said: list[tuple[str, object]] = []

    def start(self, label: str, total: int) -> None:
        self.said.append((label, total))
        self.done = 0

    def advance(self, amount: int) -> None:
        self.done += amount

    def finish(self) -> None:
        self.said.append(("finish", self.done))


def spec_of(corpus: Path, cache: Path, **changes) -> DataSpec:
    keys = {"source": "text", "path": str(corpus), "vocab": 400, "cache": str(cache)}
    return DataSpec(**{**keys, **changes})


def content(store: TokenStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.folder.iterdir()}


STOP_AFTER_A_SHARD = """
import os, signal, sys
def stop(event, args):
    parts = str(args[0]).rpartition("/")[0] if event == "open" else ""
    if parts.endswith(".parts") and os.path.exists(parts + "/shard-000000"):
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(stop)
"""
"""Stops a process that is about to write its second shard."""


def builder(spec: DataSpec, workers: int = 2, begin: str = "") -> subprocess.Popen[bytes]:
    """A process that says when it begins to prepare, and prepares."""
    code = (
        f"{begin}\n"
        "from pathlib import Path\n"
        "from equipoise.data.progress import SilentProgress\n"
        "from equipoise.data.cache.store import prepare\n"
        "from equipoise.spec.run.spec import DataSpec\n"
        "print('ready', flush=True)\n"
        f"prepare({spec!r}, Path('/'), progress=SilentProgress(), workers={workers})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


# What it holds. ----------------------------------------------------------------------------


def test_documents_come_back_as_they_were(store: TokenStore, corpus: Path):
    tokenizer = load_tokenizer(store.tokenizer_file)
    source = open_source(spec_of(corpus, corpus), corpus)
    texts = [text for shard in source.shards() for text in shard.read()]
    assert store.documents == len(texts)
    assert store.empty_documents == len(source.names) - len(texts) > 0
    assert store.undecodable_documents == 0
    assert store.tokens[:].dtype == np.uint16
    assert store.offsets.dtype == store.doc_tokens.dtype == np.int64
    assert (store.vocab, store.end) == (400, 0)
    for document in (0, len(texts) // 2, len(texts) - 1):
        tokens = store.tokens[store.offsets[document] : store.offsets[document + 1]]
        assert len(tokens) == store.doc_tokens[document]
        assert tokens[-1] == store.end
        assert tokenizer.decode(tokens[:-1]) == texts[document]
        assert (corpus / store.name(document)).read_text() == texts[document]
    assert (store.tokens[:] == store.end).sum() == store.documents


def test_names_of_lines_and_rows(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"body": ""}\n{"body": "one"}\n')
    store = prepare(
        spec_of(lines, tmp_path / "cache", source="jsonl", field="body"), tmp_path, progress=SILENT
    )
    assert [store.name(0), store.documents] == ["a.jsonl at byte 13", 1]


def test_wide_tokens_for_a_large_vocabulary(store: TokenStore, corpus: Path, tmp_path):
    file = tmp_path / "wide.json"
    core = json.loads(store.tokenizer_file.read_text())
    core["added_tokens"].append({**core["added_tokens"][0], "id": 70_000, "content": "<far>"})
    core["model"]["vocab"]["<far>"] = 70_000
    file.write_text(json.dumps(core))
    spec = spec_of(corpus / "json", tmp_path / "cache", tokenizer="wide.json")
    wide = prepare(spec, tmp_path, progress=SILENT)
    assert (wide.tokens[:].dtype, wide.vocab) == (np.uint32, 70_001)
    assert wide.tokenizer_file.read_bytes() == file.read_bytes()


def test_the_standard_library_counts_what_it_passes_over(tmp_path, monkeypatch):
    stdlib = tmp_path / "lib"
    stdlib.mkdir()
    (stdlib / "a.py").write_bytes(b"# \xff")
    (stdlib / "b.py").write_text("b = 1\n")
    (stdlib / "c.py").write_text("")
    monkeypatch.setattr("equipoise.data.source.sysconfig.get_path", lambda name: str(stdlib))
    store = prepare(DataSpec(cache=str(tmp_path / "cache")), tmp_path, progress=SILENT)
    counts = (store.documents, store.empty_documents, store.undecodable_documents)
    assert counts == (1, 1, 1)


# How it is built. --------------------------------------------------------------------------


def test_workers_build_the_same_bytes_as_one_process(store: TokenStore, corpus: Path, tmp_path):
    heard = Heard()
    spec = spec_of(corpus, tmp_path / "cache")
    parallel = prepare(spec, tmp_path, progress=heard, workers=3)
    assert content(parallel) == content(store)
    assert parallel.digest == store.digest
    size_bytes = sum(path.stat().st_size for path in corpus.rglob("*") if path.is_file())
    assert heard.said == [
        ("train tokenizer", 1),
        ("finish", 1),
        ("tokenize text:texts", size_bytes),
        ("finish", size_bytes),
    ]
    kinds = sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir())
    assert kinds == ["tokenizer", "tokens"]


def test_a_cache_that_is_there_is_opened_without_reading(store: TokenStore, corpus: Path):
    heard = Heard()
    spec = spec_of(corpus, store.folder.parent)
    times_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        again = prepare(spec, corpus, progress=heard)
        times_s.append(time.perf_counter() - start_s)
    print(f"warm open: {min(times_s) * 1e3:.1f} ms")
    assert (again.folder, heard.said) == (store.folder, [])


def test_a_corpus_that_changed_gets_a_cache_of_its_own(tmp_path):
    (tmp_path / "a.txt").write_text("one two " * 30)
    spec = spec_of(tmp_path / "a.txt", tmp_path / "cache")
    first = prepare(spec, tmp_path, progress=SILENT)
    (tmp_path / "a.txt").write_text("one two " * 31)
    second = prepare(spec, tmp_path, progress=SILENT)
    assert first.digest != second.digest
    assert len(second.tokens) > len(first.tokens)


@pytest.mark.long
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    store: TokenStore, corpus: Path, tmp_path
):
    spec = spec_of(corpus, tmp_path / "cache")
    seed = random.randrange(10**6)
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    found = []
    for attempt in range(0, 8, 2):
        process = builder(spec)
        # Early and late moments alike: training comes first, then shards, then the assembly.
        time.sleep(moments.uniform(0.0, 0.3 + 0.15 * attempt))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found.append(sorted(path.name for path in Path(spec.cache).rglob("*")))
    after = prepare(spec, tmp_path, progress=SILENT, workers=2)
    assert content(after) == content(store)
    names = sorted(path.name.split("-")[0] for path in Path(spec.cache).iterdir())
    assert names == ["tokenizer", "tokens"], found


@pytest.mark.long
def test_killed_before_each_touch_of_the_cache_it_goes_on_to_the_same_bytes(
    store: TokenStore, corpus: Path, tmp_path
):
    spec = spec_of(corpus / "json", tmp_path / "cache", tokenizer=str(store.tokenizer_file))
    done = subprocess.run(
        [sys.executable, "-c", KILL_AT_EACH_TOUCH.format(spec=spec)],
        capture_output=True,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 30


# An audit hook sees every open, rename, mkdir and remove just before it is done.
KILL_AT_EACH_TOUCH = """
import dataclasses, os, signal, sys
from pathlib import Path
from equipoise.data.progress import SilentProgress
from equipoise.data.cache.store import prepare
from equipoise.spec.run.spec import DataSpec

spec = {spec!r}

def child(cache, kill_at):
    if (pid := os.fork()) == 0:
        seen = 0
        def hook(event, args):
            nonlocal seen
            if event in EVENTS and str(args[0]).startswith(cache):
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        if kill_at:
            sys.addaudithook(hook)
        try:
            build(cache)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def build(cache):
    return prepare(
        dataclasses.replace(spec, cache=cache), Path("/"), progress=SilentProgress(), workers=1
    )

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir")
whole = build(spec.cache + "-whole")
want = {{path.name: path.read_bytes() for path in whole.folder.iterdir()}}
kill_at = 0
code = -9
while code == -9:
    kill_at += 1
    cache = spec.cache + str(kill_at)
    code = child(cache, kill_at)
    assert code in (0, -9), code
    assert child(cache, 0) == 0
    made = {{path.name: path.read_bytes() for path in (Path(cache) / whole.folder.name).iterdir()}}
    assert made == want, kill_at
    assert [path.name for path in Path(cache).iterdir()] == [whole.folder.name], kill_at
print(kill_at)
"""


def test_whole_shards_of_a_killed_build_are_used_again(store: TokenStore, corpus: Path, tmp_path):
    spec = spec_of(corpus, tmp_path / "cache", tokenizer=str(store.tokenizer_file))
    process = builder(spec, workers=1, begin=STOP_AFTER_A_SHARD)
    wait_until(lambda: is_stopped(process.pid))
    whole = list(Path(spec.cache).glob("*.parts/shard-00000[0-9]"))
    process.kill()
    process.communicate()
    made: list[Path] = []
    original = build.tokenize_shard

    def counted(shard, tokenizer, file):
        made.append(file)
        original(shard, tokenizer, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "tokenize_shard", counted)
        after = prepare(spec, tmp_path, progress=SILENT, workers=1)
    assert whole
    assert {path.name for path in made}.isdisjoint(path.name for path in whole)
    assert content(after) == content(store)


def test_a_torn_shard_is_made_again(store: TokenStore, corpus: Path, tmp_path):
    spec = spec_of(corpus, tmp_path / "cache", tokenizer=str(store.tokenizer_file))
    parts = Path(spec.cache) / f"{store.folder.name}.parts"
    parts.mkdir(parents=True)
    (parts / "shard-000000").write_bytes(b"\x01" * 7)
    (parts / "shard-000001").write_bytes(b"\x01" * 700)
    (parts / "shard-000002.building-1").write_bytes(b"\x01")
    assert content(prepare(spec, tmp_path, progress=SILENT, workers=1)) == content(store)
    assert not parts.exists()


def test_two_builders_at_once_both_end_up_right(store: TokenStore, corpus: Path, tmp_path):
    spec = spec_of(corpus, tmp_path / "cache")
    processes = [builder(spec, workers=1) for _ in range(2)]
    heard = Heard()
    third = prepare(spec, tmp_path, progress=heard, workers=1)
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0]
    assert content(third) == content(store)
    assert sum(path.suffix == ".lock" for path in Path(spec.cache).iterdir()) == 0


def test_where_locks_do_not_reach_the_first_to_rename_wins(
    store: TokenStore, corpus: Path, tmp_path, monkeypatch
):
    spec = spec_of(corpus, tmp_path / "cache", tokenizer=str(store.tokenizer_file))
    original = build.assemble

    def overtaken(*args):
        original(*args)
        building = args[3]
        other = building.with_name(building.name.split(".")[0])
        other.mkdir()
        for name, data in content(store).items():
            (other / name).write_bytes(data)

    monkeypatch.setattr(build, "assemble", overtaken)
    after = prepare(spec, tmp_path, progress=SILENT, workers=1)
    assert content(after) == content(store)
    assert [path.name for path in Path(spec.cache).iterdir()] == [store.folder.name]


def test_leftovers_of_other_builds_go_after_a_day(store: TokenStore, corpus: Path, tmp_path):
    cache = tmp_path / "cache"
    for name in ("tokens-old", "tokens-new"):
        (cache / f"{name}.parts").mkdir(parents=True)
        (cache / f"{name}.building-1").mkdir()
        (cache / f"{name}.lock").touch()
    (cache / "tokenizer-old.json.lock").touch()
    (cache / "tokenizer-old.json.building-1").touch()
    for lock in ("tokens-old.lock", "tokenizer-old.json.lock"):
        os.utime(cache / lock, (1, 1))
    prepare(
        spec_of(corpus / "json", cache, tokenizer=str(store.tokenizer_file)),
        tmp_path,
        progress=SILENT,
    )
    left = sorted(path.name for path in cache.iterdir() if "old" in path.name or "new" in path.name)
    assert left == ["tokens-new.building-1", "tokens-new.lock", "tokens-new.parts"]


def test_a_script_without_a_main_guard_may_prepare(corpus: Path, tmp_path):
    script = (
        "from pathlib import Path\n"
        "from equipoise.data.progress import SilentProgress\n"
        "from equipoise.data.cache.store import prepare\n"
        "from equipoise.spec.run.spec import DataSpec\n"
        f"spec = {spec_of(corpus, tmp_path / 'cache')!r}\n"
        "prepare(spec, Path('/'), progress=SilentProgress(), workers=2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-"], input=script.encode(), capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_no_torch_is_loaded(tmp_path):
    code = (
        "import sys, equipoise.data.cache.store, equipoise.data.stream\n"
        "assert not {'torch', 'pyarrow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What is refused. --------------------------------------------------------------------------


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.long
@pytest.mark.parametrize("culprit", ["tokenize_shard", "assemble"])
def test_a_full_disk(message, store, corpus: Path, tmp_path, monkeypatch, culprit):
    spec = spec_of(corpus, tmp_path / "cache", tokenizer=str(store.tokenizer_file))
    monkeypatch.setattr(once.shutil, "disk_usage", lambda path: Usage)
    size_bytes = open_source(spec, tmp_path).size_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, culprit, full)
        assert message(DataError, prepare, spec, tmp_path, progress=SILENT, workers=1) == (
            f"The disk of data.cache {tmp_path}/cache is full: it had 5.0 KiB left, and building "
            f"{store.folder.name} needs about {size_bytes * 4 // 3 / 2**20:.1f} MiB in all. Free "
            "some space or set data.cache to a folder on a larger disk."
        )
    assert list((tmp_path / "cache").iterdir()) == []
    assert content(prepare(spec, tmp_path, progress=SILENT, workers=1)) == content(store)


class Usage:
    free = 5 * 1024


def test_a_disk_that_is_full_for_a_worker(message, store, corpus: Path, tmp_path, monkeypatch):
    spec = spec_of(corpus, tmp_path / "cache", tokenizer=str(store.tokenizer_file))
    monkeypatch.setattr(workers, "_WORKER", FULL_WORKER)
    text = message(DataError, prepare, spec, tmp_path, progress=SILENT, workers=2)
    assert text.startswith(f"The disk of data.cache {tmp_path}/cache is full: ")
    assert list((tmp_path / "cache").iterdir()) == []


FULL_WORKER = """import errno, sys; sys.path[:] = {path!r}
from equipoise.data.cache import workers
def full(*_): raise OSError(errno.ENOSPC, "full")
workers.tokenize_shard = full
workers.work({handle})
"""


def test_a_worker_that_dies(message, store, corpus: Path, tmp_path, monkeypatch):
    spec = spec_of(corpus, tmp_path / "cache", tokenizer=str(store.tokenizer_file))
    monkeypatch.setattr(workers, "_WORKER", "import os; {handle}; {path!r}; os._exit(7)")
    text = message(DataError, prepare, spec, tmp_path, progress=SILENT, workers=2)
    first = {shard.parts[0].name for shard in open_source(spec, tmp_path).shards()[:2]}
    assert text in {
        f"The worker that tokenized {name} died with exit code 7; -9 usually means that memory "
        "ran out. Run again: finished shards are kept."
        for name in first
    }


def test_a_fault_of_the_corpus_is_told_by_workers_as_by_one(message, store, tmp_path):
    corpus = tmp_path / "texts"
    corpus.mkdir()
    for name in "abc":
        (corpus / name).write_bytes(b"a b " * 150_000)
    (corpus / "d").write_bytes(b"\xff")
    spec = spec_of(corpus, tmp_path / "cache", tokenizer=str(store.tokenizer_file))
    texts = {
        message(DataError, prepare, spec, tmp_path, progress=SILENT, workers=workers)
        for workers in (1, 2)
    }
    assert texts == {
        f"{corpus}/d is not UTF-8: byte 0xff at offset 0. Convert the file to UTF-8 or move it "
        "out of data.path."
    }


@pytest.mark.parametrize("tokenizer", ["train", "own"])
def test_a_corpus_without_text(message, store, tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("")
    spec = spec_of(
        tmp_path / "a.txt",
        tmp_path / "cache",
        tokenizer=tokenizer if tokenizer == "train" else str(store.tokenizer_file),
    )
    assert message(DataError, prepare, spec, tmp_path, progress=SILENT) == (
        f"data.path {tmp_path}/a.txt holds no text: every document is empty (0 bytes). "
        "Set data.path to a corpus with text in it."
    )
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_tokenizer(message, corpus: Path, tmp_path):
    spec = spec_of(corpus, tmp_path / "cache", tokenizer="no.json")
    assert message(DataError, prepare, spec, tmp_path, progress=SILENT) == (
        f'data.tokenizer {tmp_path}/no.json does not exist. Set data.tokenizer to "train" or to '
        "the path of a tokenizer.json."
    )


def test_a_cache_that_cannot_be_made(message, corpus: Path, tmp_path):
    (tmp_path / "file").touch()
    spec = spec_of(corpus, tmp_path / "file" / "cache")
    assert message(DataError, prepare, spec, tmp_path, progress=SILENT) == (
        f"data.cache {tmp_path}/file/cache cannot be created: not a directory. Set data.cache to "
        "a writable folder."
    )


def cut(folder: Path) -> None:
    os.truncate(folder / "tokens.bin", 100)


def lose(folder: Path) -> None:
    (folder / "offsets.bin").unlink()


def age(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "format": 0}))


def empty(folder: Path) -> None:
    (folder / "meta.json").unlink()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            cut,
            "{folder}/tokens.bin is damaged: it has 100 bytes where meta.json says {tokens:,}. "
            "Delete the folder {folder}; the next run makes it again.",
        ),
        (
            lose,
            "{folder}/offsets.bin is damaged: it has 0 bytes where meta.json says {offsets:,}. "
            "Delete the folder {folder}; the next run makes it again.",
        ),
        (
            age,
            "{folder} is a token cache of format 0; this version reads 2. Delete the folder; the "
            "next run makes it again.",
        ),
        (
            empty,
            "{folder} is not a token cache: it has no meta.json. Delete the folder; the next run "
            "makes it again.",
        ),
    ],
)
def test_damaged_caches(message, store, tmp_path, damage: Callable[[Path], None], text: str):
    folder = tmp_path / "tokens-copy"
    folder.mkdir()
    for name, data in content(store).items():
        (folder / name).write_bytes(data)
    assert open_store(folder).digest == store.digest
    sizes = {"tokens": 2 * len(store.tokens), "offsets": 8 * len(store.offsets)}
    damage(folder)
    assert message(DataError, open_store, folder) == text.format(folder=folder, **sizes)
