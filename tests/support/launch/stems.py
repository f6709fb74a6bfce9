"""Stems that outlive their launchers: runs that tests start in this process import once.

A launcher forks all its starts from one stem, and what it forks is what a fresh process would be
(``tests/unit/launch/test_stem.py``). Here the next start may be another launcher's, with the same
program, environment and output. Homes may differ, since each start is given its own, and so may the
folders that launchers begin in: ranks get whole paths. Commands that tests start as processes have
their own stems.
"""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from equipoise.launch.agent import whole_environment
from equipoise.launch.stem import GangOrder, Stem, StemAgent

MOST = 3
"""Stems that are kept; each holds some hundred MiB."""


class KeptStem(Stem):
    """A stem that the end of its launcher does not end, unless what it has forked still runs."""

    _agent: StemAgent | None = None

    def start(self, asked: GangOrder, log: int) -> StemAgent:
        home = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
        environment = {**asked.environment, **home}
        self._agent = super().start(dataclasses.replace(asked, environment=environment), log)
        return self._agent

    def close(self) -> None:
        if self._agent is not None and self._agent.returncode is None:
            self.end()

    def end(self) -> None:
        """End it, and whatever it has forked."""
        super().close()


class KeptStems:
    """Called as ``Stem``: gives the one of an earlier launcher, or starts one."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], KeptStem] = {}

    def __call__(self, program: str, log: int) -> KeptStem:
        own = whole_environment()
        for name in ("PYTEST_CURRENT_TEST", "HOME"):
            own.pop(name, None)
        output = os.fstat(1)  # ranks write to the one that was there when the stem began
        key = program, output.st_dev, output.st_ino, *sorted(own.items())
        stem = self._kept.pop(key, None)
        if stem is not None and not stem.is_alive:
            stem.end()
            stem = None
        stem = stem or KeptStem(program, log)
        self._kept[key] = stem
        while len(self._kept) > MOST:
            self._kept.pop(next(iter(self._kept))).end()
        return stem

    def end(self) -> None:
        """End all."""
        for stem in self._kept.values():
            stem.end()


@contextmanager
def keep_stems() -> Iterator[None]:
    """Let launchers of this process share stems."""
    stems = KeptStems()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equipoise.launch.local.Stem", stems)
        yield
    stems.end()
