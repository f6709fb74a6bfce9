"""``equipoise convert --layout``: what it prints, writes and refuses."""

import dataclasses
import json
import os
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from equipoise.checkpoint.index import Chunk, StoredTensor, render_index
from equipoise.checkpoint.manifest import FORMAT, Manifest, read_manifest, render_manifest
from equipoise.checkpoint.publish import collect, publish, write_part
from equipoise.fault.drill.skewed import make_other_dtype
from equipoise.nn.hf.read import weight_shapes
from support.make_run import MODEL
from support.verbs import run as run_verb

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    code, out, _ = run_verb(capsys, *argv)
    assert code == 0
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    code, out, error = run_verb(capsys, *argv)
    assert (code in (2, 4), out) == (True, "")
    return error


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one checkpoint of one rank."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    root = folder / "checkpoint"
    (root / ".saving").mkdir(parents=True)
    index, start = {}, 0
    for name, shape in weight_shapes(MODEL).items():
        for key in (f"model.{name}", *(f"optimizer.state.{name}.{m}" for m in MOMENTS)):
            own = () if key.endswith(".step") else shape
            size = 4 * int(np.prod(own))
            chunk = Chunk((0,) * len(own), own, "shard-00000.bin", start, size)
            index[key] = StoredTensor("float32", own, (chunk,))
            start += size
    sizes = dataclasses.asdict(MODEL)
    manifest = Manifest(FORMAT, "0.1.0", 3, 768, 1, sizes, "c" * 32, 0, 256, {})
    root_handle, handle = (
        os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (root, root / ".saving")
    )
    data = np.arange(start // 4, dtype=np.float32).tobytes()
    write_part(handle, 0, memoryview(data), threading.Event())
    shards = collect(handle, 1, threading.Event())
    texts = {"tensors.json": render_index(index), "packer.json": '{"waiting": 0}\n'}
    publish(root_handle, ".saving", handle, manifest, shards, texts)
    for each in (root_handle, handle):
        os.close(each)
    return folder


def test_a_dry_run_prints_what_ranks_would_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, "convert", str(run), "--layout", "dp=2,tp=2", "--dry-run").splitlines()
    assert lines[0] == (
        f"{run}/checkpoint/step-000003 (331.2 KiB in shards, written by 1 rank) loaded with "
        f"dp=2,tp=2, zero=1:"
    )
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [row[0] for row in cells] == ["0", "1", "2", "3", "all"]
    assert cells[-1][1] == "344.4 KiB"
    assert re.fullmatch(
        r"At [\d.]+ [KMG]iB/s, measured on this machine's disk: [\d.]+ \S+ if ranks share one such "
        r"disk, [\d.]+ \S+ if each has its own.",
        lines[-1],
    )


def test_json_counts_bytes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--layout", "dp=2,tp=2", "--dry-run")
    answer = json.loads(printed(capsys, "convert", str(run), *words, "--json"))
    assert (answer["folder"], answer["step"], answer["ranks_before"]) == (None, 3, 1)
    assert answer["layout"] == {
        axis: 2 if axis in ("dp", "tp") else 1
        for axis in ("dp", "cp", "tp", "pp", "ep", "etp", "zero", "replicas")
    }
    weights = weight_shapes(MODEL)
    stored = sum(4 * (3 * int(np.prod(shape)) + 1) for shape in weights.values())
    assert answer["stored_bytes"] == stored
    copied = sum(  # over tp: norms, and the only key/value head
        12 * int(np.prod(shape))
        for name, shape in weights.items()
        if "norm" in name or ".key." in name or ".value." in name
    )
    assert answer["needed_bytes"] == stored + copied + 3 * 4 * len(weights)  # counts of steps
    # One rank verifies the only block, which is less than 4 MiB, and reads all of it.
    assert answer["read_bytes"] < 2 * stored
    assert max(rank["read_bytes"] for rank in answer["ranks"]) == stored
    rate = answer["disk_bytes_per_s"]
    assert answer["shared_disk_s"] == answer["read_bytes"] / rate
    assert answer["own_disk_s"] == stored / rate
    assert printed(capsys, "convert", str(run), *words, "--quiet") == f"{answer['read_bytes']}\n"


def test_a_checkpoint_is_rewritten_with_all_that_belongs_to_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new"
    text = printed(capsys, "convert", str(run), str(target), "--layout", "dp=3")
    path = target / "checkpoint" / "step-000003"
    assert text.startswith(f"Wrote {path}.\n{path} (")
    manifest = read_manifest(path)
    assert (manifest.world, manifest.position_tokens) == (3, 768)
    assert sorted(manifest.files) == [
        *("packer.json", "shard-00000.bin", "shard-00001.bin", "shard-00002.bin", "tensors.json")
    ]
    assert (path / "packer.json").read_text() == '{"waiting": 0}\n'
    assert refused(capsys, "convert", str(run), str(target), "--layout", "dp=3") == (
        f"{target} already exists. Name a new folder, or delete it.\n"
    )


def test_a_torn_newest_checkpoint_is_passed_over(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    newer = other / "checkpoint" / "step-000004"
    shutil.copytree(other / "checkpoint" / "step-000003", newer)
    manifest = dataclasses.replace(read_manifest(run / "checkpoint" / "step-000003"), step=4)
    (newer / "manifest.json").write_text(render_manifest(manifest))
    data = bytearray((newer / "shard-00000.bin").read_bytes())
    data[5] ^= 1
    (newer / "shard-00000.bin").write_bytes(data)
    code, out, error = run_verb(capsys, "convert", other, tmp_path / "new", "--layout", "dp=2")
    error = error.split("\n", 1)[1]  # after the bar
    assert (code, out.splitlines()[0]) == (0, f"Wrote {tmp_path}/new/checkpoint/step-000003.")
    assert error.startswith(f"{newer} is torn: the bytes of shard-00000.bin have changed between 0")
    assert error.splitlines()[0].endswith(" Passed over.")
    argv = ("convert", newer, tmp_path / "other", "--layout", "dp=2", "--quiet")
    code, _, error = run_verb(capsys, *argv)
    assert (code, (tmp_path / "other").exists()) == (4, False)
    assert error.startswith(f"{newer} is torn: the bytes of shard-00000.bin have changed between 0")


def test_with_many_ranks_the_most_and_the_least_are_printed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, "convert", run, "--layout", "dp=65", "--dry-run").splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [row[0] for row in cells][2:] == ["all"]
    assert len({row[0] for row in cells}) == 3


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("--layout", "dp=2")
    assert refused(capsys, "convert", str(run)) == "convert needs TO, the folder to make.\n"
    assert refused(capsys, "convert", str(run), *layout) == (
        "convert --layout needs TO, the folder to make. To see what ranks would read, add "
        "--dry-run.\n"
    )
    assert refused(capsys, "convert", str(run), "to", "--dry-run") == (
        "--dry-run belongs to --layout. Give the layout, as --layout dp=4,tp=2.\n"
    )
    assert refused(capsys, "convert", str(run), "to", *layout, "--dtype", "bf16") == (
        "--dtype belongs to a Hugging Face folder, and --layout writes a checkpoint. Give one of "
        "them.\n"
    )
    assert refused(capsys, "convert", str(run), "to", *layout, "--cluster-experts", "0") == (
        "--cluster-experts belongs to a Hugging Face folder, and --layout writes a checkpoint. "
        "Give one of them.\n"
    )
    for words in (("--dtype", "bf16"), ("--tokenizer", "tokenizer.json")):
        assert refused(capsys, "convert", str(run), "to", "--adapter", *words) == (
            f"{words[0]} is for a model, and --adapter writes adapters alone. Leave one out.\n"
        )
    assert refused(capsys, "convert", str(run), "--layout", "tp=3", "--dry-run").startswith(
        "2 heads do not divide over 3 tensor-parallel ranks. Set tp (layout.tp) to one of 1, 2,"
    )
    assert refused(capsys, "convert", str(run), "--layout", "cpp=3", "--dry-run").startswith(
        'layout: "cpp=3" begins with no known name. Nearest: cp.'
    )
    assert refused(capsys, "convert", str(run), "--layout", "dp=65536", "--dry-run") == (
        "layout: 65,536 ranks are too many: each is counted, which takes 10 ms. Give degrees whose "
        "product is 16,384 or less.\n"
    )
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "new"
    assert refused(capsys, "convert", str(run), str(below), *layout, "--quiet") == (
        f"The checkpoint could not be written to {below}/checkpoint (Not a directory). Name a "
        f"folder on another disk.\n"
    )
    (tmp_path / "checkpoint").mkdir()
    assert refused(capsys, "convert", str(tmp_path), *layout, "--dry-run") == (
        f"{tmp_path} has no checkpoint yet. Train it further; checkpoint.every_steps says how "
        f"often one is written.\n"
    )


def test_weights_of_another_dtype_are_not_converted_into_numbers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its sums are right, and its bits would be read as whole numbers."""
    other = shutil.copytree(run, tmp_path / "run")
    checkpoint = other / "checkpoint" / "step-000003"
    assert make_other_dtype(checkpoint) == "model.embed.weight float32 -> int32"
    for words in ((str(tmp_path / "to"), "--quiet"), ("--layout", "dp=2", "--dry-run")):
        assert refused(capsys, "convert", str(other), *words) == (
            f"{checkpoint} holds another model: its embed.weight is int32, and weights are trained "
            "in float32. Restore a copy of it.\n"
        )
    assert not (tmp_path / "to").exists()
