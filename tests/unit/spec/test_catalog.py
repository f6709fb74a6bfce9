"""The catalog against the functions that it names, run.toml, and every other file."""

import ast
import inspect
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import equipoise
from equipoise.balance.packing.pack import make_packer
from equipoise.base.errors import LayoutError
from equipoise.base.load import load
from equipoise.cost.curve import counted_curve
from equipoise.schedule.pipeline.instruction import OP, Op
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import count_in_flight
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import place_stages, write_pipeline
from equipoise.spec.catalog import LOSSY, POLICIES, SCHEDULES, Policy, Schedule
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import PackSpec

SOURCE = Path(equipoise.__file__).parent
CURVE = counted_curve(preset("2m"))
LENGTHS = np.array([900, 40, 130, 260, 15, 70, 330, 180])
PIECES = np.stack((np.arange(8), np.zeros(8, dtype=np.int64), LENGTHS), axis=1)
RANKS = 2


def written(schedule: str, *, stages: int, micro_batches: int = 8, **more) -> PipelineSchedule:
    prices = make_prices(3, 3, 3, stages=RANKS * stages, micro_batches=micro_batches)
    return write_pipeline(schedule, prices, ranks=RANKS, **more)


def may(schedule: str, **more) -> bool:
    try:
        written(schedule, **more)
    except LayoutError:
        return False
    return True


def test_the_names_are_those_of_run_toml() -> None:
    assert get_args(Policy) == tuple(POLICIES)
    assert get_args(Schedule) == tuple(SCHEDULES)
    assert set(LOSSY) < set(SCHEDULES)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_takes_what_its_row_says(policy: str) -> None:
    traits = POLICIES[policy]
    assert traits.packer.startswith("balance.")
    taken = set(inspect.signature(load(traits.packer)).parameters)
    assert ("meets_each_turn" in taken) == traits.evens_turns
    assert ("travel_ns" in taken) == traits.prices_travel
    assert ("pieces" in taken) != traits.lets_wait


@pytest.mark.parametrize("policy", [name for name, each in POLICIES.items() if not each.is_slow])
def test_a_policy_does_what_its_row_says(policy: str) -> None:
    traits = POLICIES[policy]
    cap = 512 if traits.divides else 1024  # of a document of 900 tokens
    packer = make_packer(PackSpec(policy=policy, context_tokens=512, max_tokens=cap), RANKS, CURVE)
    packed = packer.step(PIECES)
    assert packed.policy == policy
    ranks_of: dict[int, set[int]] = {}
    turns_of: dict[int, set[int]] = {}
    reads = False
    for rank, batches in enumerate(packed.ranks):
        for turn, batch in enumerate(batches):
            reads |= bool((batch.history_tokens > 0).any())
            for document in batch.pieces[:, 0].tolist():
                ranks_of.setdefault(document, set()).add(rank)
                turns_of.setdefault(document, set()).add(turn)
    is_cut = sum(len(batch.pieces) for batch in packed) > len(ranks_of)
    assert reads == traits.divides
    assert is_cut == (traits.divides or traits.fills_windows)
    assert bool(packer.flush()) == traits.lets_wait
    if traits.runs_together:
        assert max(map(len, ranks_of.values())) > 1
    if traits.needs_pipeline:
        assert max(map(len, ranks_of.values())) == 1 < max(map(len, turns_of.values()))


@pytest.mark.parametrize("policy", [name for name, each in POLICIES.items() if not each.is_slow])
def test_a_policy_that_reads_no_price_packs_the_same_at_any(policy: str) -> None:
    pack = PackSpec(policy=policy, context_tokens=512, max_tokens=1024)
    draw = np.random.default_rng(0)
    digests = {True: set(), False: set()}
    for _ in range(6):
        lengths = draw.integers(10, 1000, 12)
        pieces = np.stack((np.arange(12), np.zeros(12, dtype=np.int64), lengths), axis=1)
        packs = [
            make_packer(pack, 3, curve).step(pieces).digest
            for curve in (CURVE, counted_curve(preset("llama3-8b")))
        ]
        digests[packs[0] == packs[1]].add(packs[0])
    assert not digests[False] or POLICIES[policy].reads_prices


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_does_what_its_row_says(schedule: str) -> None:
    traits = SCHEDULES[schedule]
    assert traits.writer.startswith("schedule.pipeline.")
    least, most = traits.least_stages, traits.most_stages
    legal = [stages for stages in (1, 2, 3) if may(schedule, stages=stages)]
    if most is None:
        assert legal == [1, 2, 3]
    else:
        assert legal == list(range(least, most + 1))
    made = written(schedule, stages=least)
    placed = place_stages(schedule, RANKS, RANKS * least)
    assert schedule == "auto" or (made.rank_of == placed).all()
    ops = {op for order in made.orders for op in order[:, OP].tolist()}
    assert (Op.BACKWARD_WEIGHT in ops) == traits.splits_backward
    if traits.is_lossy:
        assert written(schedule, stages=2, skip=0.5).is_lossy
    few = [count for count in range(1, 9) if may(schedule, stages=least, micro_batches=count)]
    assert few[0] == max(1, traits.batches_per_rank * RANKS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_runs_slices_of_documents_as_its_row_says(schedule: str) -> None:
    traits = SCHEDULES[schedule]
    units = [(0, 3), *((at, at + 1) for at in range(3, 8))]
    assert may(schedule, stages=traits.least_stages, units=units) == traits.runs_slices


@pytest.mark.parametrize("schedule", [name for name, each in SCHEDULES.items() if each.adapts])
def test_a_schedule_that_adapts_fits_the_largest_micro_batch(schedule: str) -> None:
    stages = SCHEDULES[schedule].least_stages
    assert written(schedule, stages=stages, most_held=stages).strategy == schedule


@pytest.mark.parametrize("schedule", [name for name, each in SCHEDULES.items() if each.order])
def test_an_order_without_prices_holds_what_the_schedule_holds(schedule: str) -> None:
    traits = SCHEDULES[schedule]
    assert not traits.ahead
    whole = written(schedule, stages=traits.least_stages)
    sizes = np.ones((RANKS * traits.least_stages, 8), dtype=np.int64)
    assert (count_in_flight(whole, sizes).peak >= 1).all()


def test_forwards_run_ahead_as_rows_say() -> None:
    for name, traits in SCHEDULES.items():
        if traits.ahead:
            stages = traits.least_stages
            first, last = written(name, stages=stages).orders
            warm = [int(np.argmax(order[:, OP] != Op.FORWARD)) for order in (first, last)]
            assert warm[0] - warm[1] == traits.ahead, name


def _constants(node: ast.AST) -> list[object]:
    """What a dict, tuple, list or set of Python lists itself."""
    parts: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        parts = [*node.keys, *node.values]
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        parts = [*node.elts]
    return [each.value for each in parts if isinstance(each, ast.Constant)]


def test_no_other_file_lists_policies_or_schedules() -> None:
    # Parsing the whole tree takes seconds, and few files quote two of the names at all.
    texts = {file: file.read_text() for file in SOURCE.rglob("*.py")}
    tables = (POLICIES, SCHEDULES)
    quoting = {
        file: text
        for file, text in texts.items()
        if any(sum(f'"{name}"' in text for name in names) > 1 for names in tables)
    }
    lists = {
        str(file.relative_to(SOURCE))
        for file, text in quoting.items()
        for node in ast.walk(ast.parse(text))
        for names in tables
        if len(set(names) & set(_constants(node))) > 1
    }
    # Planners of groups have names of their own, some of which are those of policies.
    assert lists == {"spec/catalog.py", "balance/groups/policies.py"}
