"""Parts of tensors come back from their file bit for bit, in whole blocks."""

from pathlib import Path

import torch

from equipoise.memory.blocks import PAGE_BYTES
from equipoise.memory.slices import SliceFile


def test_parts_come_back_and_are_counted_in_blocks(tmp_path: Path) -> None:
    parts = {"a": torch.randn(1000), "b": torch.randn(4321), "empty": torch.zeros(0)}
    file = SliceFile(tmp_path, {name: part.nbytes for name, part in parts.items()})
    for name, part in parts.items():
        file.run(lambda name=name, part=part: file.write(name, part))
    out = {name: torch.empty_like(part) for name, part in parts.items()}
    for name, part in out.items():
        # Asked for after the write, so it sees it.
        file.run(lambda name=name, part=part: file.read(name, part)).result()
    assert all(torch.equal(out[name], part) for name, part in parts.items())
    assert file.block_bytes == PAGE_BYTES
    assert file.read_bytes == file.written_bytes == (1 + 5) * PAGE_BYTES
    assert file.of(4321 * 4) == 5 * PAGE_BYTES
    part = out["a"]
    part.untyped_storage().resize_(0)  # no view of it is left that would forbid this
    file.close()
