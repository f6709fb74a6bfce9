"""Tiles grouped into calls: each tile in one call, and attention by calls equals that by tiles."""

import numpy as np
import pytest
import torch

from equipoise.balance.context.plan import ContextPlan, plan_context
from equipoise.comm.drive import drive_together
from equipoise.parallel.context.backward import Backward
from equipoise.parallel.context.forward import Forward
from equipoise.parallel.context.program import compile_rank
from equipoise.spec.mask import Mask

LENGTHS = (130, 1, 64, 5, 200, 33)
CPU = torch.device("cpu")
CASES = [
    ("needed-kv", None),
    ("ring", None),
    ("pass-q", None),
    ("ulysses", None),
    ("needed-kv", Mask("window", 70)),
]


def plan(strategy: str, mask: Mask | None) -> ContextPlan:
    given = {} if mask is None else {"mask": mask}
    return plan_context(LENGTHS, 3, strategy, heads=6, kv_heads=3, **given)


def run(
    schedule: ContextPlan, *, by_calls: bool, softcap: float = 0.0
) -> list[tuple[torch.Tensor, ...]]:
    """Outputs and gradients of every rank."""
    torch.manual_seed(0)
    programs = [compile_rank(schedule.schedule, rank, CPU, by_calls=by_calls) for rank in range(3)]
    sent = np.zeros((3, 3), dtype=np.int64)
    passes = []
    for program in programs:
        q = torch.randn(program.home_tokens, 6, 8, dtype=torch.float64)
        k, v = (torch.randn(program.home_tokens, 3, 8, dtype=torch.float64) for _ in range(2))
        passes.append(Forward(program, q, k, v, softcap))
    drive_together([each.steps() for each in passes], sent)
    back = [
        Backward(program, each.kept, torch.cos(each.output), softcap)
        for program, each in zip(programs, passes, strict=True)
    ]
    drive_together([each.steps() for each in back], sent)
    return [(each.output, *other.gradients) for each, other in zip(passes, back, strict=True)]


@pytest.mark.parametrize(("strategy", "mask"), CASES)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_calls_equal_tiles(strategy: str, mask: Mask | None, softcap: float) -> None:
    schedule = plan(strategy, mask)
    one, other = (run(schedule, by_calls=each, softcap=softcap) for each in (False, True))
    for mine, theirs in zip(one, other, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert (x - y).abs().max() <= 1e-12
    again = run(schedule, by_calls=True, softcap=softcap)
    for mine, theirs in zip(other, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("strategy", "mask"), CASES)
def test_every_tile_is_in_one_call_and_rows_of_a_call_are_distinct(
    strategy: str, mask: Mask | None
) -> None:
    schedule = plan(strategy, mask).schedule
    tiles = calls = 0
    for rank in range(3):
        for each in compile_rank(schedule, rank, CPU, by_calls=True).rounds:
            wanted = sorted(
                (tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start)
                for tile in each.tiles
            )
            grouped = sorted(
                pair
                for call in each.calls
                for pair in zip(call.runs.queries, call.runs.keys, strict=True)
            )
            assert grouped == wanted
            for call in each.calls:
                for rows, runs, bounds in (
                    (call.query_rows, call.runs.queries, call.runs.query_bounds),
                    (call.key_rows, call.runs.keys, call.runs.key_bounds),
                ):
                    assert len(rows.unique()) == len(rows) == sum(runs)
                    assert bounds.diff().tolist() == list(runs)
            tiles, calls = tiles + len(each.tiles), calls + len(each.calls)
    assert calls < tiles


def test_a_cpu_runs_tile_by_tile() -> None:
    program = compile_rank(plan("ring", None).schedule, 0)
    assert all(not each.calls for each in program.rounds)
