"""Functions of ranks in ``test_layout``: cases that are wrong on purpose."""

from equipoise.comm.group import Ranks
from equipoise.comm.turns import play_ranks
from equipoise.train.check.case import Case, Verdict
from equipoise.train.check.prove import check_cases
from support.ranks.on_ranks import build_with_wrong_gradient


def spoiled(host: Ranks, case: Case, parameter: str, *, step: int) -> Verdict:
    """A case in which rank 1 has a wrong gradient of one parameter in one of its two runs."""
    del host

    def run(ranks: Ranks) -> list[Verdict]:
        build = build_with_wrong_gradient(parameter, 1, factor=1.001, step=step)
        return check_cases(ranks, [case], build=build)

    return play_ranks(case.ranks, run)[0][0]


def spoil_first(host: Ranks, case: Case, parameter: str) -> Verdict:
    return spoiled(host, case, parameter, step=1)


def spoil_second(host: Ranks, case: Case, parameter: str) -> Verdict:
    return spoiled(host, case, parameter, step=2)
