"""The cheapest policy for each micro-batch, by price, and tries of each to hold prices to.

Why
    Which policy is fastest depends on the rows at hand: none where routers are even, copies where
    they are not, weights instead of rows where there are many rows for few experts.

What it decides
    All policies that these ranks and slots allow write a schedule, and the one with the lowest
    price (``balance.expert.price``) is obeyed, the first of equals. A price is a forecast: so one
    step of every ``TRIAL_STEPS`` obeys each policy in turn, from the third on, whatever its price.
    Their seconds say by how much the choice is slower than the best of single policies.

Kept true (tests/unit/balance/expert/test_tutel.py)
    No policy is cheaper than the choice; equal requests have equal answers.
"""

from dataclasses import dataclass

from equipoise.balance.expert.price import price_experts
from equipoise.balance.expert.request import ExpertPolicy, ExpertRequest
from equipoise.schedule.expert.schedule import ExpertSchedule

TRIAL_STEPS = 100
"""Steps after which each policy is tried again: five tries cost at most a twentieth of the time
that they lose."""

_FIRST_TRIAL = 2
"""The first step is slow, and the second is the first that has seen loads."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyChoice:
    """A schedule, and what all policies' were priced."""

    schedule: ExpertSchedule
    prices: dict[str, float]
    """Rows that the slowest rank could compute meanwhile, by policy."""


def choose_policy(
    request: ExpertRequest, policies: dict[str, ExpertPolicy], *, trial: str = ""
) -> PolicyChoice:
    """The cheapest schedule.

    Args:
        request: Whose ``prices`` say what travel costs.
        policies: By name; those that cannot serve the request are passed over.
        trial: A policy to obey whatever it costs, if it can serve the request.
    """
    written = {
        name: policy(request) for name, policy in policies.items() if can_serve(name, request)
    }
    prices = {name: price_experts(each, request.prices) for name, each in written.items()}
    cheapest = min(prices, key=lambda name: prices[name])
    return PolicyChoice(written[trial if trial in written else cheapest], prices)


def can_serve(policy: str, request: ExpertRequest) -> bool:
    """Whether ranks divide the experts, and slots hold what the policy copies."""
    ranks, experts = request.rows.shape
    if policy == "eplb":
        return bool(experts % ranks == 0)
    return policy != "tutel" or request.slots >= most_copies(int(experts), int(ranks))


def most_copies(experts: int, ranks: int) -> int:
    """Copies of a rank that has every expert.

    >>> most_copies(8, 4), most_copies(7, 4)
    (6, 6)
    """
    return -(-experts // ranks) * (ranks - 1)


def most_held(policy: str, *, experts: int, ranks: int, slots: int) -> int:
    """Most copies that a rank holds at a time under a policy, whatever routers choose.

    ``eplb`` may move all experts of a rank: it fills its slots and as many places as it owns.

    >>> policies = "fixed", "exact", "eplb", "tutel"
    >>> [most_held(policy, experts=8, ranks=4, slots=1) for policy in policies]
    [0, 1, 3, 6]
    """
    most = most_copies(experts, ranks) if experts else 0
    if policy in ("fixed", "speculative"):
        return 0
    if policy == "tutel":
        return most
    moved = experts // ranks if policy in ("eplb", "auto") and experts % ranks == 0 else 0
    return min(most, slots + moved)


def trial_of(step: int, policies: list[str]) -> str:
    """The policy that a step tries; empty for most steps.

    Args:
        step: How many the run has done before.
        policies: By name.

    >>> [trial_of(step, ["fixed", "exact"]) for step in (0, 1, 2, 3, 4, 102)]
    ['', '', 'fixed', 'exact', '', 'fixed']
    """
    at = step % TRIAL_STEPS - _FIRST_TRIAL
    return policies[at] if 0 <= at < len(policies) else ""
