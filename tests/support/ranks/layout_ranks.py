"""What ranks run in ``test_check_layout``: layouts in which something is wrong on purpose."""

from equipoise.comm.group import Ranks
from equipoise.comm.turns import play_ranks
from equipoise.train.check import all_legal as check_layout
from equipoise.train.check.all_legal_case import LayoutCase, LayoutVerdict


def spoiled(host: Ranks, case: LayoutCase, parameter: str, *, step: int) -> LayoutVerdict:
    """A layout of which rank 1 has another gradient of one parameter, in one of its two runs."""
    del host
    plain = check_layout._LayoutRun.step
    seen: dict[int, int] = {}

    def run(ranks: Ranks) -> list[LayoutVerdict]:
        def wrong(self: check_layout._LayoutRun) -> float:
            loss = plain(self)
            at = self.mesh.ranks.rank
            seen[at] = seen.get(at, 0) + 1
            grad = self.gradients().get(parameter)
            if grad is not None and at == 1 and seen[at] == step:
                grad *= 1.001
            return loss

        check_layout._LayoutRun.step = wrong
        return check_layout.check_layouts(ranks, [case])

    try:
        return play_ranks(case.layout.world, run)[0][0]
    finally:
        check_layout._LayoutRun.step = plain


def spoil_first(host: Ranks, case: LayoutCase, parameter: str) -> LayoutVerdict:
    return spoiled(host, case, parameter, step=1)


def spoil_second(host: Ranks, case: LayoutCase, parameter: str) -> LayoutVerdict:
    return spoiled(host, case, parameter, step=2)
