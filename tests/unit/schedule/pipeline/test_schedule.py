"""The nouns of a pipeline: tables, instructions, paths, names."""

import dataclasses

import numpy as np

from equipoise.schedule.pipeline.instruction import Instruction, Op
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.schedule import Neighbours, place_in_v
from equipoise.schedule.pipeline.strategies import write_pipeline

PRICES = make_prices(1, 1, 1, stages=2, micro_batches=3)


def test_instructions_name_what_the_table_holds() -> None:
    schedule = write_pipeline("1f1b", PRICES, ranks=2, units=[(0, 2), (2, 3)])
    assert list(schedule.instructions(1)) == [
        Instruction(Op.FORWARD, 1, 0, 0),
        Instruction(Op.FORWARD, 1, 1, 1),
        Instruction(Op.BACKWARD, 1, 1, 1),
        Instruction(Op.BACKWARD, 1, 0, 0),
        Instruction(Op.FORWARD, 1, 2, 0),
        Instruction(Op.BACKWARD, 1, 2, 0),
    ]
    assert [op.words for op in Op] == ["forward", "backward", "input gradient", "weight gradient"]


def test_the_digest_names_everything() -> None:
    schedule = write_pipeline("gpipe", PRICES, ranks=2)
    other = [
        dataclasses.replace(schedule, strategy="x"),
        dataclasses.replace(schedule, rank_of=schedule.rank_of[::-1]),
        dataclasses.replace(schedule, orders=schedule.orders[::-1]),
        dataclasses.replace(schedule, paths=schedule.paths[::-1, ::-1]),
        dataclasses.replace(schedule, units=np.array([[0, 3]])),
    ]
    names = {each.digest for each in (schedule, *other)}
    assert len(names) == 6
    assert schedule.digest == write_pipeline("gpipe", PRICES, ranks=2).digest


def test_neighbours_on_a_path_that_skips_and_turns() -> None:
    beside = Neighbours.of(np.array([[0, 2, 1, 3], [0, 3, -1, -1]]), 4)
    assert beside.before.tolist() == [[-1, -1], [2, -2], [0, -2], [1, 0]]
    assert beside.after.tolist() == [[2, 3], [3, -2], [1, -2], [-1, -1]]


def test_a_v_turns_on_the_last_rank() -> None:
    assert place_in_v(1).tolist() == [0, 0]
    schedule = write_pipeline("zb-v", make_prices(1, 1, 1, stages=4, micro_batches=2), ranks=2)
    assert schedule.rank_of.tolist() == [0, 1, 1, 0]
    assert (schedule.ranks, schedule.stages, schedule.micro_batches) == (2, 4, 2)
