"""Slow ranks of a run: from what its steps measured to a line in the journal and on the console.

What it decides
    Nothing: ``fault.detect.slow`` does. What it needs travels with the numbers that ranks exchange
    in every step anyway: 40 bytes of each rank, 8 of them what its host says (``health.host``). If
    that is not known when a rank is named, it is said as soon as it is. Steps beside which a
    checkpoint is staged or written do not count: ranks write different amounts. A rank whose
    exchanges are slow because one of its links is known to be is not accused.

Kept true (tests/multi/fault/test_slow.py, tests/unit/train/test_slow_watch.py)
    A rank that sleeps between layers, or reads slowly, is named with its part.
"""

import dataclasses

import numpy as np

from equipoise.comm.group import Ranks
from equipoise.fault.detect.slow import SlowRank, SlowRanks, StepTimes
from equipoise.observe.journal import EventSink
from equipoise.observe.pauses import GarbagePauses
from equipoise.sim.rank_loads import RankLoads
from equipoise.train.health.host import HostAnswer
from equipoise.train.health.links import LinkWatch
from equipoise.train.step import StepResult


class SlowWatch:
    """Watches all ranks' steps; rank 0 speaks for all.

    Args:
        ranks: All of them.
        journal: This rank's.
        pauses: Its known pauses, which are journaled.
        links: What is known of the ranks' links, if anything.
        sides: Policies that compute each step in turns; of several, the times cannot be told apart.
    """

    def __init__(
        self,
        ranks: Ranks,
        journal: EventSink,
        pauses: GarbagePauses,
        links: LinkWatch | None,
        sides: int,
    ) -> None:
        self._slow, self._journal, self._pauses = SlowRanks(ranks.world), journal, pauses
        self._is_silent = ranks.rank != 0 or sides > 1
        self._unexplained: dict[int, SlowRank] = {}
        """Ranks that are slow, whose hosts have not said why."""
        self._links, self._excused = links, set[int]()
        """Ranks that exchange slowly because of a link, which was named instead."""

    def look(
        self, step: int, loads: RankLoads, result: StepResult, *, is_saving: bool
    ) -> list[str]:
        """Take a finished step into account; sentences on ranks that are slow now, or no more."""
        self._pauses.write(self._journal, step)
        if is_saving or self._is_silent:
            return []
        *own, hosts = np.array([dataclasses.astuple(each) for each in result.rank_own]).T
        times = StepTimes(np.array(loads.predicted_s), *own)
        sentences = []
        for verdict in self._slow.learn(step, times):
            self._unexplained.pop(verdict.rank, None)
            if self._is_excused(verdict):
                continue
            answer = HostAnswer() if verdict.is_over else HostAnswer.read(hosts[verdict.rank])
            if not verdict.is_over and not answer.is_known:
                self._unexplained[verdict.rank] = verdict
            text = " ".join(filter(None, (verdict.sentence, answer.sentence)))
            sentences.append(text)
            self._write("even" if verdict.is_over else "slow", step, verdict, answer, text)
        for rank in list(self._unexplained):
            answer = HostAnswer.read(hosts[rank])
            if answer.is_known:
                verdict = self._unexplained.pop(rank)
                text = f"Rank {rank} is slow since step {verdict.since}. {answer.sentence}"
                sentences.append(text)
                self._write("slow-why", step, verdict, answer, text)
        return sentences

    def _is_excused(self, verdict: SlowRank) -> bool:
        """Whether a link is why a rank exchanges slowly; then nothing is said of its end either."""
        if verdict.is_over:
            was_excused = verdict.rank in self._excused
            self._excused.discard(verdict.rank)
            return was_excused
        is_link = self._links is not None and self._links.touches(verdict.rank)
        if is_link and verdict.part == "communication":
            self._excused.add(verdict.rank)
            return True
        return False

    def _write(
        self, name: str, step: int, verdict: SlowRank, answer: HostAnswer, text: str
    ) -> None:
        self._journal.write(
            "instant",
            name,
            step=step,
            slow_rank=verdict.rank,
            part=verdict.part,
            excess=verdict.excess,
            extra_s=verdict.extra_s,
            host_share=verdict.host_share,
            cause=verdict.cause,
            since=verdict.since,
            whose=answer.whose,
            resource=answer.resource or "",
            neighbour_share=answer.neighbour_share,
            message=text,
        )
