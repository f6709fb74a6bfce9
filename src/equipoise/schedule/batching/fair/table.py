"""Every policy of fairness by name."""

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.schedule.batching.fair.fifo import Fifo
from equipoise.schedule.batching.fair.job_fair import JobFair
from equipoise.schedule.batching.fair.policy import MakePolicy
from equipoise.schedule.batching.fair.user_fair import UserFair
from equipoise.schedule.batching.fair.uwfq import Uwfq
from equipoise.schedule.batching.fair.vtc import Vtc

FAIR_POLICIES: dict[str, MakePolicy] = {
    "fifo": Fifo,
    "job-fair": JobFair,
    "user-fair": UserFair,
    "vtc": Vtc,
    "uwfq": Uwfq,
}

DEFAULT_POLICY = "uwfq"
"""What engine and simulator use unless another is named."""


def find_policy(name: str) -> MakePolicy:
    """A policy by its name.

    Raises:
        SpecError: there is none; names the nearest.
    """
    if name not in FAIR_POLICIES:
        raise SpecError(
            f'No policy of fairness is called "{name}". Nearest: {nearest(name, FAIR_POLICIES)}. '
            f"All: {', '.join(FAIR_POLICIES)}."
        )
    return FAIR_POLICIES[name]
