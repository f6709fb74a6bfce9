"""A plan that also chooses what balances experts: every policy, with few slots and with more.

Why
    How many ranks should share a layer's experts depends on how uneven these are there, and that
    on the policy and on the copies for which each rank has memory. Chosen one after the other, the
    layout is the best for loads that it does not meet.

What it decides
    Policies of ``sim.settle.experts`` are searched one by one, each with 1, 2, 4 and so on slots up
    to those that are given, and each for an equal share of the time. The fastest step that fits
    wins; sentences say what each other one takes with the layout that is best for it.

Kept true (tests/unit/plan/test_balanced.py)
    No policy alone, with any number of slots that was tried, has a faster plan; the bound holds for
    all of them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from equipoise.base.errors import FitError, SpecError
from equipoise.base.units import format_seconds
from equipoise.plan.described import PlanRequest
from equipoise.sim.settle.experts import FORECAST_POLICIES, require_loads
from equipoise.spec.plan import Candidate, Plan
from equipoise.spec.words import read_layout, read_model

ANY = "any"
"""The policy of a request that leaves it open."""

Answer = TypeVar("Answer")


def search_policies(
    request: PlanRequest, search: Callable[[PlanRequest], Answer], lock_of: Callable[[Answer], Plan]
) -> tuple[Answer, Plan]:
    """The answer of the policy with the fastest plan, and its lock with what the others take.

    Args:
        request: Leaves the policy open, and gives the most slots.
        search: Plans with one policy.
        lock_of: The lock of an answer.

    Raises:
        SpecError: the loads of experts are missing, or the slots are not 1 or more.
        FitError: nothing fits under any policy.
    """
    if request.expert_loads is None:
        raise SpecError(
            f"expert_policy = {ANY} needs expert_loads, what routers choose. Give both or neither."
        )
    experts = read_model(request.model).experts
    require_loads(dataclasses.replace(request, expert_policy="exact"), experts=experts)
    tried = list(_settings(request.expert_slots, experts))
    answers: dict[tuple[str, int], Answer] = {}
    refused: dict[tuple[str, int], Exception] = {}
    for policy, slots in tried:
        out = None if request.out is None else request.out / f"{policy}-{slots}"
        one = dataclasses.replace(
            request,
            expert_policy=policy,
            expert_slots=slots,
            seconds=request.seconds / len(tried),
            out=out,
        )
        try:
            answers[policy, slots] = search(one)
        except (FitError, SpecError) as error:  # nothing fits, or nothing was found in time
            refused[policy, slots] = error
    if not answers:
        raise next(iter(refused.values()))
    locks = {setting: lock_of(answer) for setting, answer in answers.items()}
    best = min(locks, key=lambda setting: _step_s(locks[setting]))
    lock, others = locks[best], [each for each in tried if each != best]
    bound_s = min(each.bound_s for each in locks.values())
    first = f"Of {len(tried)} ways to balance experts, {_named(*best)} is the fastest."
    policy, slots = best
    if read_layout(lock.best.words["layout"]).layout.ep == 1:
        policy, first = "fixed", "The fastest layout shares no experts, so none need balance."
    balanced = {"expert-policy": policy}
    balanced |= {} if policy == "fixed" else {"expert-slots": str(slots)}
    whole = dataclasses.replace(
        lock,
        asked=request.asked(),
        best=_with_words(lock.best, balanced),
        runners_up=tuple(_with_words(each, balanced) for each in lock.runners_up),
        bound_s=bound_s,
        gap=_step_s(lock) / bound_s - 1.0 if bound_s > 0.0 else None,
        listed=sum(each.listed for each in locks.values()),
        priced=sum(each.priced for each in locks.values()),
        remarks=(first, *(_said(each, locks, lock, refused) for each in others), *lock.remarks),
    )
    return answers[best], whole


def _settings(slots: int, experts: int) -> Iterator[tuple[str, int]]:
    """Policies and slots to search; more slots than experts hold nothing more."""
    yield "fixed", 1
    for policy in FORECAST_POLICIES:
        many = 1
        while policy != "fixed" and many <= min(slots, experts):
            yield policy, many
            many *= 2


def _with_words(candidate: Candidate, more: dict[str, str]) -> Candidate:
    return dataclasses.replace(candidate, words=candidate.words | more)


def _step_s(lock: Plan) -> float:
    seconds: float = lock.best.price["step_s"]
    return seconds


def _named(policy: str, slots: int) -> str:
    if policy == "fixed":
        return policy
    return f"{policy} with {slots} slot{'s' if slots > 1 else ''}"


def _said(
    setting: tuple[str, int],
    locks: dict[tuple[str, int], Plan],
    best: Plan,
    refused: dict[tuple[str, int], Exception],
) -> str:
    """What another policy takes with its own best layout."""
    if setting in refused:
        in_time = "" if isinstance(refused[setting], FitError) else " was found in time that"
        return f"With {_named(*setting)} no layout{in_time} fits."
    lock = locks[setting]
    slower = _step_s(lock) / _step_s(best) - 1.0
    return (
        f"With {_named(*setting)}: {lock.best.words['layout']}, {format_seconds(_step_s(lock))} a "
        f"step, {slower:+.1%}."
    )
