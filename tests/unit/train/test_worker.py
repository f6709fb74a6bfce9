"""What a rank refuses before it touches anything."""

from pathlib import Path

import pytest
import torch

from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.spec.model import preset
from equipoise.spec.resolved import ResolvedFile
from equipoise.spec.run import LayoutSpec, RunSpec
from equipoise.train import worker


@pytest.mark.parametrize(
    ("context", "world", "fix"),
    [(1, 3, "--nproc-per-node 4, or --layout.dp 3"), (2, 3, "--nproc-per-node 4")],
)
def test_other_ranks_than_the_run_wants(tmp_path: Path, context: int, world: int, fix: str) -> None:
    layout = LayoutSpec(dp=4 // context, context=context)
    spec = RunSpec(layout=layout)
    resolved = ResolvedFile(spec, preset("2m"), {}, layout.count_ranks(cores=1), "", "")
    with pytest.raises(LayoutError) as caught:
        worker._train(tmp_path, resolved, Ranks(0, world, torch.device("cpu")), quiet=True)
    assert str(caught.value) == f"torchrun started 3 ranks and the run wants 4. Pass {fix}."
    assert list(tmp_path.iterdir()) == []
