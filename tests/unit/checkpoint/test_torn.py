"""Damaged shards by the hundred: each is noticed and named, and the checkpoint before is used."""

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.checkpoint.manifest import newest_good, read_manifest
from equipoise.fault.drill.damage import TEARS
from support.checkpoints.sealed import SHARDS, write

CASES = 400


def rot(draw: random.Random) -> Callable[[Path, Path], None]:
    """One to three bits anywhere; two of them may be the same bit of other bytes."""

    def damage(file: Path, older: Path) -> None:
        del older
        data, bit = bytearray(file.read_bytes()), 1 << draw.randrange(8)
        for at in draw.sample(range(len(data)), draw.randint(1, 3)):
            data[at] ^= bit
        file.write_bytes(data)

    return damage


def exchange(draw: random.Random) -> Callable[[Path, Path], None]:
    """Two bytes of a shard in each other's place, which leaves every sum of bytes as it was."""

    def damage(file: Path, older: Path) -> None:
        del older
        data = bytearray(file.read_bytes())
        one, other = draw.sample(range(len(data)), 2)
        while data[one] == data[other]:
            one, other = draw.sample(range(len(data)), 2)
        data[one], data[other] = data[other], data[one]
        file.write_bytes(data)

    return damage


def cut(draw: random.Random) -> Callable[[Path, Path], None]:
    def damage(file: Path, older: Path) -> None:
        del older
        data = file.read_bytes()
        file.write_bytes(data[: draw.randrange(len(data))])

    return damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "checkpoint"
    for step in (2, 3):
        read_manifest(write(root, step))
    return root


@pytest.mark.long
def test_every_damage_is_named_and_the_one_before_is_used(whole: Path, tmp_path: Path) -> None:
    """Torn, swapped, stale, doubled, lost, cut and rotten shards, at drawn places."""
    done: Counter[str] = Counter()
    root = tmp_path / "checkpoint"
    for seed in range(CASES):
        draw = random.Random(seed)
        kinds = {"bits": rot(draw), "exchanged": exchange(draw), "cut": cut(draw), **TEARS}
        kind = [*kinds][seed % len(kinds)]
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(whole, root)
        newest = root / "step-000003"
        shard = newest / f"shard-{draw.randrange(SHARDS):05}.bin"
        before = {path.name: path.read_bytes() for path in newest.iterdir()}
        kinds[kind](shard, root / "step-000002" / shard.name)
        after = {path.name: path.read_bytes() for path in newest.iterdir()}
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        assert changed, (seed, kind)  # the fault fired
        folder, manifest, (sentence,) = newest_good(root)
        assert (folder.name, manifest.step) == ("step-000002", 2), (seed, kind)
        named = re.search(r"is torn: (?:the bytes of )?(shard-\d+\.bin)", sentence)
        assert named is not None and named[1] in changed, (seed, kind, sentence)
        assert f" model.{int(named[1][6:11])}." in sentence, (seed, kind, sentence)
        done[kind] += 1
    assert min(done.values()) >= CASES // 11 and sum(done.values()) == CASES
