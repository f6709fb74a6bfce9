"""Dynamic groups as packs: turn a step's group plan into each rank's micro-batches.

What it decides
    ``balance.groups.policies`` decides which ranks share which document, except that ``gangs``
    yields to a cheaper wrap over neighbours (``balance.packing.divided_choice``). Here each rank
    of a gang gets a run from the document's front and one from its back, as under ``divided``,
    and every gang is one micro-batch of its ranks. Ranks run different numbers of them.

Kept true (tests/unit/balance/packing/test_pack.py, by Hypothesis)
    Each token appears once; no micro-batch is over the cap; a document's parts belong to one gang.
"""

import numpy as np

from equipoise.balance.groups.bytescale import plan_bytescale
from equipoise.balance.groups.cost import GroupCosts
from equipoise.balance.groups.flexsp import plan_flexsp
from equipoise.balance.groups.gangs import plan_gangs
from equipoise.balance.groups.plan import GroupPlan
from equipoise.balance.groups.policies import GroupPlanner
from equipoise.balance.packing.divided_choice import cheapest_division
from equipoise.balance.packing.turns import align_turns
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces, lengths_of
from equipoise.spec.run.spec import PackSpec


def pack_gangs(
    pieces: Pieces,
    pack: PackSpec,
    ranks: int,
    curve: LoadCurve,
    *,
    travel_ns: float | None = None,
    meets_each_turn: bool = False,
) -> PackedStep:
    """Gangs of any size, so that all ranks end together; or a cheaper wrap, travel included.

    The arguments are those of ``balance.packing.pack.make_packer``.
    """

    def plan(most_ns: int | None) -> tuple[PackedStep, int]:
        del most_ns  # no price is known before the plan
        gangs = plan_gangs(lengths_of(pieces), ranks, GroupCosts(curve), pack.most_tokens)
        packed = _held("gangs", gangs, pieces)
        return (align_turns(packed), 0) if meets_each_turn else (packed, gangs.critical_ns)

    return cheapest_division(
        "gangs",
        [plan],
        pieces,
        pack,
        ranks,
        curve,
        travel_ns=travel_ns,
        meets_each_turn=meets_each_turn,
    )


def pack_flexsp(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """FlexSP: groups of powers of two in each micro-batch, by an exact search."""
    return _pack("flexsp", plan_flexsp, pieces, pack, ranks, GroupCosts(curve))


def pack_bytescale(pieces: Pieces, pack: PackSpec, ranks: int, curve: LoadCurve) -> PackedStep:
    """ByteScale: each document on as few ranks as hold it, with balanced ranks."""
    return _pack("bytescale", plan_bytescale, pieces, pack, ranks, GroupCosts(curve))


def _pack(
    policy: str,
    planner: GroupPlanner,
    pieces: Pieces,
    pack: PackSpec,
    ranks: int,
    costs: GroupCosts,
) -> PackedStep:
    return _held(policy, planner(lengths_of(pieces), ranks, costs, pack.most_tokens), pieces)


def _held(policy: str, plan: GroupPlan, pieces: Pieces) -> PackedStep:
    held: list[list[MicroBatch]] = [[] for _ in range(plan.ranks)]
    for gang in plan.gangs:
        for rank, batch in zip(
            gang.ranks, _share(pieces[list(gang.documents)], len(gang.ranks)), strict=True
        ):
            held[rank].append(batch)
    return PackedStep(policy, tuple(map(tuple, held)))


def _share(rows: Pieces, ranks: int) -> list[MicroBatch]:
    """Each rank's part of a gang's documents; ranks differ by at most one token."""
    if ranks == 1:
        return [MicroBatch(rows)]
    document, start, stop = (column[:, None] for column in rows.T)
    least, over = divmod(stop - start, ranks)
    # A document's leftover tokens go to the ranks after those that got the previous ones.
    turn = (np.arange(ranks) - (np.cumsum(over) - over[:, 0])[:, None]) % ranks
    tokens = least + (turn < over)
    front = (tokens + 1) // 2
    heads = start + np.cumsum(front, axis=1)
    tails = stop - np.cumsum(tokens - front, axis=1)
    held = []
    for place in range(ranks):
        runs = [
            (heads[:, place] - front[:, place], heads[:, place]),
            (tails[:, place], tails[:, place] + (tokens - front)[:, place]),
        ]
        if place == ranks - 1:  # head and tail meet
            runs = [(runs[0][0], runs[1][1])]
        parts = [np.stack((document[:, 0], a, b, start[:, 0]), axis=1) for a, b in runs]
        table = np.concatenate(parts)
        table = table[table[:, 1] < table[:, 2]]
        held.append(MicroBatch(table[:, :3], table[:, 3]))
    return held
