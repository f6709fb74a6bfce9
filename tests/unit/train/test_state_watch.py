"""Weights that change before the first step of a run are found in that step."""

import torch

from equipoise.comm.group import Ranks
from equipoise.fault.fingerprint import HeldState
from equipoise.observe.journal import EventSink
from equipoise.train.health.state import StateWatch


def test_what_changes_before_the_first_update_is_named() -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    alone = Ranks(0, 1, torch.device("cpu"))
    watch = StateWatch(HeldState(layer, optimizer, 0), alone, EventSink(), every_steps=5)
    watch.begin(8)
    assert (watch.verified, watch.changed_parts()) == (8, [])
    with torch.no_grad():
        layer.weight.view(torch.int32)[1, 2] ^= 1 << 7
    assert watch.changed_parts() == ["weight"]
    watch.begin(8)  # what is loaded and verified is trusted
    assert watch.changed_parts() == []
