"""Group policies: document lengths in, gangs of ranks out.

Why
    A document that no rank holds alone, or that alone would outlast the step, needs several
    ranks. Policies differ in how many they give it, and what runs beside it.

What it decides
    Which function plans under which name: ``gangs`` is ours, ``flexsp`` and ``bytescale`` are
    published systems.

Kept true (tests/unit/balance/groups/test_policies.py, by Hypothesis)
    What every group plan keeps (``balance.groups.plan``), for every policy here.
"""

from functools import partial
from typing import Literal, Protocol

import numpy.typing as npt

from equipoise.balance.groups.bytescale import plan_bytescale
from equipoise.balance.groups.cost import GroupCosts
from equipoise.balance.groups.flexsp import plan_flexsp
from equipoise.balance.groups.gangs import plan_gangs
from equipoise.balance.groups.plan import GroupPlan

GroupPolicy = Literal["gangs", "flexsp", "bytescale-naive", "bytescale-dp", "bytescale-pp"]


class GroupPlanner(Protocol):
    """Plans one step's documents over all ranks."""

    def __call__(
        self, doc_tokens: npt.ArrayLike, ranks: int, costs: GroupCosts, cap_tokens: int
    ) -> GroupPlan:
        """Give each document its ranks and its start."""


GROUP_POLICIES: dict[GroupPolicy, GroupPlanner] = {
    "gangs": plan_gangs,
    "flexsp": plan_flexsp,
    "bytescale-naive": partial(plan_bytescale, schedule="naive"),
    "bytescale-dp": partial(plan_bytescale, schedule="dp"),
    "bytescale-pp": partial(plan_bytescale, schedule="pp"),
}
"""Every group policy, in display order."""
