"""Checkpoints whose files a test has written, and their manifests."""

import random
from pathlib import Path

from equipoise.base.digest import digest_file
from equipoise.checkpoint.blocks import SummedFile, blocks, digest_sums, sum_block
from equipoise.checkpoint.index import Chunk, StoredTensor, write_index
from equipoise.checkpoint.manifest import FORMAT, MANIFEST, Manifest, render_manifest

SHARDS, TENSORS, TENSOR_BYTES = 3, 4, 600


def describe_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of every file of a folder except the manifest, as before format 3."""
    return {
        path.name: (path.stat().st_size, digest_file(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a folder's manifest, sealed."""
    (folder / MANIFEST).write_text(render_manifest(manifest))


def write(root: Path, step: int) -> Path:
    """A whole checkpoint of several shards with several tensors, as format 3 has it."""
    folder, draw = root / f"step-{step:06}", random.Random(step)
    folder.mkdir(parents=True)
    index = {}
    for shard in range(SHARDS):
        name = f"shard-{shard:05}.bin"
        (folder / name).write_bytes(draw.randbytes(TENSORS * TENSOR_BYTES))
        for at in range(TENSORS):
            start = at * TENSOR_BYTES
            chunk = Chunk((0,), (TENSOR_BYTES,), name, start, TENSOR_BYTES)
            index[f"model.{shard}.{at}"] = StoredTensor("uint8", (TENSOR_BYTES,), (chunk,))
    write_index(folder, index)
    summed = {}
    for path in folder.glob("shard-*"):
        data = path.read_bytes()
        summed[path.name] = SummedFile(
            len(data), tuple(sum_block(data[start:stop]) for start, stop in blocks(len(data)))
        )
    files = describe_files(folder) | {
        name: (each.size_bytes, digest_sums(each.sums)) for name, each in summed.items()
    }
    held = {name: each.sums for name, each in summed.items()}
    fields = (FORMAT, "0.1.0", step, 1024 * step, SHARDS, {}, "c" * 32, 0, 256, files)
    write_manifest(folder, Manifest(*fields, blocks=held))
    return folder
