"""Save in the background: copy while nothing changes, write while the next steps are computed.

Why
    A run that stops for every save is saved too rarely. Weights and moments do not change from one
    optimizer step to the next, so they can be copied while the next forward and backward run;
    once copied, the disk may take its time.

What it decides
    ::

        training  | step 4 | begin | forward, backward of step 5 | wait | optimizer | step 6 ...
        writing            |       | copy into the arena         |      | write, verify, publish |

    One thread in each rank copies and writes. The arena in host memory holds this rank's part of a
    checkpoint, is allocated once (pinned where there is a device) and used again. At most one
    checkpoint is under way; whoever wants to begin the next one waits for it.

    The training's groups are used by the training's thread alone. A rank knows by itself that its
    part has failed, and rank 0 that the whole is published; both have news, which ranks exchange
    with the numbers of a step. When one has, all call ``settle``.

Kept true (tests/multi/checkpoint/test_background.py, tests/multi/checkpoint/test_kills.py)
    What is loaded is bitwise what was there when the save began, whatever is trained meanwhile;
    a disk that refuses costs that save alone.

Sources
    DataStates-LLM: arXiv:2406.10707.
"""

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import torch
from torch import Tensor, nn

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import INDEX, render_index
from equipoise.checkpoint.manifest import Manifest, folder_name
from equipoise.checkpoint.places import Placed, Places
from equipoise.checkpoint.publish import (
    SAVING,
    collect,
    discard,
    discard_partial,
    drop_others,
    publish,
    sync_above,
    write_part,
)
from equipoise.checkpoint.room import explain_unwritten
from equipoise.checkpoint.under_way import SaveTimes, UnderWay
from equipoise.comm.group import Ranks

_LEAVE_S = 10.0
"""The longest wait for a thread whose save was given up: its disk may hang."""

Reached = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was published."""

    path: Path
    step: int
    size_bytes: int
    """This rank's part."""
    times: SaveTimes


@dataclass(slots=True, eq=False, kw_only=True)
class _Save(UnderWay):
    """A save under way on this rank."""

    manifest: Manifest
    texts: Mapping[str, str]
    boxes: list[Placed] = field(default_factory=list)
    index: str = ""
    ready: Any = None
    """On a device: when its stream has come to the state that is saved."""


class Saver:
    """Saves one model in the background; one on each rank.

    Args:
        root: Folder of the run's checkpoints; another may be set between saves.
        module: Sharded weights.
        optimizer: Its moments; every step of it waits for what is still to be copied.
        ranks: All ranks; each has one of these.
        keep: Number of checkpoints to keep.
        reached: Called with the name of each stage of a save that this rank reaches; may raise.
        stored: From a tensor to itself, or to what a file has of it where it has no memory; called
            from the thread that saves.
    """

    def __init__(
        self,
        root: Path,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        *,
        keep: int,
        reached: Reached | None = None,
        stored: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.root = root
        self.verified: set[Path] = set()
        """Checkpoints of which every byte has been verified."""
        self._module, self._optimizer, self._ranks = module, optimizer, ranks
        self._keep, self._reached = keep, reached or _pass_on
        self._stored = stored or (lambda tensor: tensor)
        self._places: Places | None = None
        self._index = self._session = ""
        self._serial = 0
        self._lasting: Path | None = None
        """The folder of checkpoints whose own name was flushed."""
        self._arena: Tensor | None = None
        self._save: _Save | None = None
        self._saves: SimpleQueue[_Save | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    @property
    def step(self) -> int | None:
        """The step that is being saved, if any; the same on all ranks."""
        return None if self._save is None else self._save.manifest.step

    @property
    def arena_bytes(self) -> int:
        """Memory of a CPU that the arena takes beside what steps hold; none on a device."""
        if self._places is None or self._ranks.device.type == "cuda":
            return 0
        return self._places.size_bytes

    @property
    def has_news(self) -> bool:
        """Whether this rank's part has failed, or on rank 0 the save has ended."""
        save = self._save
        return save is not None and (bool(save.fault) or (self._leads and save.ended.is_set()))

    @property
    def _leads(self) -> bool:
        return self._ranks.rank == 0

    def begin(self, manifest: Manifest, texts: Mapping[str, str]) -> None:
        """Begin to save ``root/step-NNNNNN``; every rank calls it while nothing is under way.

        Nothing that the disk refuses is raised here: ``settle`` does.

        Args:
            manifest: The checkpoint's description; its files are filled in.
            texts: Further small files, by name.
        """
        began = time.perf_counter()
        if self._save is not None:
            raise ValueError(f"Step {self.step} is being saved: settle it before the next one.")
        if self._places is None:
            self._plan()
        self._serial += 1
        name = f"{SAVING}{manifest.step:06d}-{self._session}-{self._serial}"
        save = _Save(self.root, name, began, manifest=manifest, texts=texts)
        self._save = save
        try:
            self._hand_over(save)
        except Exception as error:  # ranks hear of it together, in ``settle``
            save.fail(error)
            save.end()
        else:
            self._saves.put(save)
        save.times.blocked_s += time.perf_counter() - began

    def settle(self) -> Saved | None:
        """Wait until the save under way has ended on all ranks; every rank calls it.

        Returns:
            What was published; None if nothing was under way.

        Raises:
            CheckpointError: on every rank, if any could not write; older checkpoints remain.
        """
        save, began = self._save, time.perf_counter()
        if save is None:
            return None
        save.written.wait()
        if not (has_failed := self._any(save.fault)):
            save.ended.wait()
            has_failed = self._any(save.fault)
        if has_failed:
            raise self._give_up(save)
        self._save = None
        save.close()
        save.times.settled_s = time.perf_counter() - began
        save.times.blocked_s += save.times.settled_s
        path = save.root / folder_name(save.manifest.step)
        return Saved(path, save.manifest.step, save.size_bytes, save.times)

    def close(self) -> None:
        """End the thread; a save that is under way is given up."""
        self._hook.remove()
        if self._save is not None:
            self._save.abandoned.set()
        self._saves.put(None)
        if self._thread is not None:
            self._thread.join(_LEAVE_S)
            if self._thread.is_alive():
                return
        if self._save is not None:
            self._save.close()
            self._save = None

    def _plan(self) -> None:
        """Decide places, and a name for this session's folders; ranks meet."""
        self._places = Places(self._module, self._optimizer, self._ranks)
        self._index = render_index(self._places.index)
        self._session = self._ranks.gather_objects(uuid.uuid4().hex[:8])[0]
        self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
        self._thread.start()

    def _hand_over(self, save: _Save) -> None:
        """Everything that cannot wait: the folder, and copies of what a forward may change."""
        assert self._places is not None  # noqa: S101
        save.open()
        save.boxes, save.size_bytes, save.index = [], self._places.size_bytes, self._index
        for box in self._places.placed():
            if not box.is_steady:
                box = Placed(box.tensor.clone(), box.start, is_steady=True)
            save.boxes.append(box)
        if self._ranks.device.type == "cuda":
            save.ready = torch.cuda.Event()
            save.ready.record()

    def _before_step(self, *_: Any) -> None:
        """Keep the optimizer from what is not copied yet."""
        save = self._save
        if save is not None and not save.staged.is_set():
            began = time.perf_counter()
            save.staged.wait()
            save.times.blocked_s += time.perf_counter() - began

    def _any(self, fault: str) -> bool:
        return bool(self._ranks.gather_floats([float(bool(fault))]).any())

    def _give_up(self, save: _Save) -> CheckpointError:
        """Clear away a save that failed on some rank."""
        save.abandoned.set()
        save.ended.wait()
        fault = next(each for each in self._ranks.gather_objects(save.fault) if each)
        message = ""
        if self._leads:
            if save.root_handle >= 0:
                discard(save.root_handle, save.name)
            # fp32 weights and the optimizer's two moments of each
            least = 3 * sum(p.numel() * p.element_size() for p in self._module.parameters())
            message = explain_unwritten(save.root, save.manifest.step, fault, least)
        save.close()
        self._save = None
        return CheckpointError(self._ranks.gather_objects(message)[0])

    # In the thread. ----------------------------------------------------------------------------

    def _work(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.set_device(self._ranks.device)
        while (save := self._saves.get()) is not None:
            publish = partial(self._publish, save) if self._leads else None
            save.work(partial(self._write, save), publish)
            save.boxes = []

    def _stage(self, save: _Save) -> None:
        """Copy this rank's boxes into the arena."""
        device = self._ranks.device
        arena = self._hold(save.size_bytes)
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_event(save.ready)
            with torch.cuda.stream(stream):
                self._copy(save, arena)
            stream.synchronize()
        else:
            self._copy(save, arena)

    @torch.no_grad()
    def _copy(self, save: _Save, arena: Tensor) -> None:
        for box in save.boxes:
            tensor = self._stored(box.tensor)
            place = arena[box.start : box.start + tensor.nbytes]
            if tensor.nbytes:
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def _hold(self, size_bytes: int) -> Tensor:
        """The arena, allocated at the first save."""
        if self._arena is None or self._arena.numel() != size_bytes:
            pinned = self._ranks.device.type == "cuda"
            self._arena = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._arena

    def _write(self, save: _Save) -> None:
        self._stage(save)
        save.staged.set()
        save.times.staged_s = time.perf_counter() - save.began
        self._reached("staged")
        data = self._hold(save.size_bytes).numpy().data
        write_part(save.handle, self._ranks.rank, data, save.abandoned)
        self._reached("written")

    def _publish(self, save: _Save) -> None:
        discard_partial(save.root_handle, but=save.name)
        shards = collect(save.handle, self._ranks.world, save.abandoned)
        self._reached("collected")
        texts = {INDEX: save.index, **save.texts}
        if save.root != self._lasting:
            sync_above(save.root)
            self._lasting = save.root
        publish(save.root_handle, save.name, save.handle, save.manifest, shards, texts)
        self._reached("published")
        self.verified.add(save.root / folder_name(save.manifest.step))
        drop_others(save.root_handle, save.root, save.manifest.step, self._keep, self.verified)
        self._reached("dropped")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pass_on(stage: str) -> None:
    """Reach a stage that nobody waits for."""
