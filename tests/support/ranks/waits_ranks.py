"""Where the host of an accelerator would wait for its device in a step, seen on a CPU twin of it.

On a CPU nothing waits, so what would is recognised by its name: reading a number of a tensor, and
operators whose result's size depends on numbers of a tensor.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import equipoise
from equipoise.balance.packing.turns import align_turns
from equipoise.comm.group import Ranks
from equipoise.cost.curve import counted_curve
from equipoise.data.stream import DocumentStream
from equipoise.observe.journal import EventSink
from equipoise.spec.catalog import POLICIES
from equipoise.train.build import build_packer, build_runner, join_sharing
from equipoise.train.check.case import Case
from equipoise.train.check.sample import References

_ROOT = Path(equipoise.__file__).parent
_READS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "equal", "is_nonzero")
_HOST_READS = ("tolist", "numpy", "cpu")
_MADE = (torch.tensor, torch.as_tensor, torch.from_numpy)


@dataclasses.dataclass
class Seen:
    """What a step does."""

    waits: Counter[str] = dataclasses.field(default_factory=Counter)
    """By "phase file: operator"."""
    made: Counter[str] = dataclasses.field(default_factory=Counter)
    """Tensors made of numbers of the host, by file."""
    operators: Counter[str] = dataclasses.field(default_factory=Counter)
    """All of them, by phase."""


class _Phases(EventSink):
    """Knows which block of a step is under way."""

    def __init__(self) -> None:
        self.under_way = ""

    @contextmanager
    def phase(self, name: str, **fields: Any) -> Iterator[None]:
        self.under_way = name
        try:
            yield
        finally:
            self.under_way = ""


def _file(frame: FrameType | None) -> str:
    """The file of this package that is nearest on the stack."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT):
            return str(path.relative_to(_ROOT))
        frame = frame.f_back
    return "torch"


class _Operators(TorchDispatchMode):
    def __init__(self, seen: Seen, phases: _Phases) -> None:
        super().__init__()
        self.seen, self.phases = seen, phases

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.operators[self.phases.under_way] += 1
        is_masked = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool
            for each in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        is_sized = (kwargs or {}).get("output_size") is not None
        is_unsized = str(func) == "aten.repeat_interleave.Tensor" and not is_sized
        if name in _READS or is_masked or is_unsized:
            self.seen.waits[f"{self.phases.under_way} {_file(sys._getframe())}: {name}"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _watch_calls(seen: Seen, phases: _Phases) -> Iterator[None]:
    """Watch calls that reach no operator, also in a backward, where no mode of torch sees them."""

    def watch(frame: Any, event: str, called: Any) -> None:
        if event != "c_call":
            return
        is_read = called.__name__ in _HOST_READS
        if is_read and isinstance(getattr(called, "__self__", None), torch.Tensor):
            seen.waits[f"{phases.under_way} {_file(frame)}: {called.__name__}"] += 1
        if called in _MADE:
            seen.made[_file(frame)] += 1

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def steps_wait(ranks: Ranks, cases: list[Case]) -> list[Seen]:
    """Each case, one after the other on the same ranks."""
    return [step_waits(ranks, case) for case in cases]


def step_waits(ranks: Ranks, case: Case) -> Seen:
    """What a whole step of a case would wait for, update and all."""
    references, curve, phases, seen = References(), counted_curve(case.model), _Phases(), Seen()
    sample, resolved = references.sample(case), case.resolved
    window = case.pack.context_tokens
    stream = DocumentStream(sample.pieces[:, 2], seed=0, context_tokens=window)
    sharing = join_sharing(resolved, ranks, curve, stream)
    runner = build_runner(resolved, ranks, sample.store, phases, sharing, small_bytes=0)
    packed = build_packer(resolved.spec, ranks.world, curve).step(sample.pieces)
    if POLICIES[packed.policy].runs_together:
        packed = align_turns(packed)
    given: dict[str, Any] = {
        "rate": 1e-3,
        "clip_norm": 1.0,
        "last_good": lambda: None,
        "stop_asked": False,
    }
    runner.run(packed, step=1, **given)  # what is made once is made now
    with _Operators(seen, phases), _watch_calls(seen, phases):
        result = runner.run(packed, step=2, **given)
    assert np.isfinite(result.loss)
    return seen
