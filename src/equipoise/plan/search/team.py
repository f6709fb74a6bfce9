"""Nodes that this process and its forks evaluate together, one process a core.

Why
    Evaluations do not depend on each other, and Python uses one core. A fork has everything
    that was read so far without a byte being sent.

What it decides
    Who answers what. Questions of one *home* share what is cached for them, so they go where that
    home went before. A new home goes where homes like it went, or to the process with least work.
    Every process gives the same answer, so a search ends as it would have alone. Questions of a
    fork that was killed are answered here.

Kept true (tests/unit/plan/search/test_team.py)
    Answers are those of one process, in order; errors are raised here; no fork is left behind.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Hashable, Sequence
from multiprocessing.connection import Connection
from typing import Any

Answer = Callable[[Any], Any]

Home = tuple[Hashable, ...]
"""What questions have in common, first what most of them share."""

_UNEVEN = 1.2
"""How much more than the least asked a process may have been asked, to be asked something new."""

_MOST_FORKS = 7


def spare_cores() -> int:
    """Cores that this process may use beside its own; 0 where processes cannot be forked."""
    if sys.platform != "linux":
        return 0
    return min(len(os.sched_getaffinity(0)) - 1, _MOST_FORKS)


class Team:
    """This process and its forks; a context manager that ends them."""

    def __init__(self, answer: Answer, forks: int) -> None:
        """Fork.

        Args:
            answer: Answers a question; pure, but for what it caches.
            forks: How many.
        """
        self._answer = answer
        self._forks: dict[int, Connection] = {}
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._homes: dict[Home, int] = {}
        self._asked = dict.fromkeys(range(forks + 1), 0.0)
        if not forks:
            return
        context = multiprocessing.get_context("fork")
        for number in range(1, forks + 1):
            mine, theirs = context.Pipe()
            others = [*self._forks.values(), mine]
            process = context.Process(target=_serve, args=(answer, theirs, others), daemon=True)
            process.start()
            theirs.close()
            self._forks[number] = mine
            self._processes.append(process)

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        for fork in self._forks.values():
            fork.close()
        for process in self._processes:
            process.kill()
            process.join()

    def ask(
        self, questions: Sequence[Any], homes: Sequence[Home], weights: Sequence[float]
    ) -> list[Any]:
        """Answers, in order.

        Args:
            questions: What is asked; sent to forks by pickle.
            homes: Home of each question.
            weights: How long each takes, about, in any unit.

        Raises:
            Exception: what a question raised, here or in a fork; nothing can be asked then.
        """
        shares = self._share(homes, weights)
        mine = shares.pop(0)
        for number, places in shares.items():
            self._send(number, [questions[at] for at in places])
        answered: dict[int, Any] = {at: self._answer(questions[at]) for at in mine}
        for number, places in shares.items():
            answers = self._receive(number)
            if answers is None:
                answers = [self._answer(questions[at]) for at in places]
            answered |= dict(zip(places, answers, strict=True))
        return [answered[at] for at in range(len(questions))]

    def _share(self, homes: Sequence[Home], weights: Sequence[float]) -> dict[int, list[int]]:
        """Places of the questions of each process; this one is 0."""
        groups: dict[Home, list[int]] = {}
        for at, home in enumerate(homes):
            groups.setdefault(home, []).append(at)
        shares: dict[int, list[int]] = {number: [] for number in (0, *self._forks)}
        for home, places in sorted(groups.items(), key=lambda each: -len(each[1])):
            least = min(shares, key=self._asked.__getitem__)
            most = _UNEVEN * self._asked[least]
            wide, own = (self._homes.get(each) for each in (home[:1], home))
            if own not in shares:
                own = wide if wide in shares and self._asked[wide] <= most else least
                self._homes[home] = own
            self._homes.setdefault(home[:1], own)
            shares[own] += places
            self._asked[own] += sum(weights[at] for at in places)
        return shares

    def _send(self, number: int, questions: list[Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._forks[number].send(questions)

    def _receive(self, number: int) -> list[Any] | None:
        """Its answers; None of a fork that is gone."""
        try:
            answers = self._forks[number].recv()
        except (EOFError, ConnectionResetError):
            self._forks.pop(number).close()
            return None
        if isinstance(answers, Exception):
            raise answers
        return list(answers)


def _serve(answer: Answer, asked: Connection, others: list[Connection]) -> None:
    """Answer until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for each in others:  # or this fork would keep them open when the one that asks is gone
        each.close()
    while True:
        try:
            questions = asked.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answers: Any = [answer(each) for each in questions]
        except Exception as error:
            answers = error
        asked.send(answers)
