"""What is said of slow ranks beside a slow link, with made-up steps and verdicts on links."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.comm.group import Ranks
from equipoise.fault.detect.links import SlowLink
from equipoise.observe.journal import Journal
from equipoise.observe.pauses import GarbagePauses
from equipoise.train.health.links import LinkWatch
from equipoise.train.health.own import OwnParts
from equipoise.train.health.slow import SlowWatch


def said(folder: Path, links: LinkWatch | None, part: str) -> list[str]:
    """What is said while rank 1 takes long for a part of forty steps, and then no more."""
    shown: list[str] = []
    with Journal(folder / "journal", 0) as journal:
        ranks = Ranks(0, 2, torch.device("cpu"))
        watch = SlowWatch(ranks, journal, GarbagePauses(), links, 1)
        for step in range(1, 81):
            usual: dict[str, Any] = {"data_s": 0.0, "compute_s": 0.1, "communication_s": 0.01}
            late = usual | {part: usual[part] + 0.08 * (step <= 40)}
            own = [OwnParts(**each, core_s=each["compute_s"]) for each in (usual, late)]
            loads: Any = SimpleNamespace(predicted_s=np.full(2, 0.1))
            result: Any = SimpleNamespace(rank_own=own)
            shown += watch.look(step, loads, result, is_saving=False)
    return shown


@pytest.mark.parametrize(
    ("part", "begins"),
    [("communication_s", []), ("compute_s", ["Rank 1 is slow: ", "Rank 1 is as fast as the "])],
)
def test_a_link_that_is_slow_excuses_exchanges_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, begins: list[str]
) -> None:
    links = LinkWatch([], lambda sentence: None)
    monkeypatch.setattr(links._slow, "learn", lambda *_: [SlowLink(1, 0, 1e6, 1e8, 0)])
    assert not links.touches(1)
    links.hear({})
    assert links.touches(0) and links.touches(1) and not links.touches(2)
    shown = said(tmp_path / "beside", links, part)
    assert [text.startswith(begin) for text, begin in zip(shown, begins, strict=True)] == (
        [True] * len(begins)
    )
    over = SlowLink(1, 0, 1e8, 1e8, 0, is_over=True)
    monkeypatch.setattr(links._slow, "learn", lambda *_: [over])
    links.hear({})
    assert not links.touches(1)
    assert len(said(tmp_path / "alone", links, part)) == len(said(tmp_path / "no", None, part)) == 2
