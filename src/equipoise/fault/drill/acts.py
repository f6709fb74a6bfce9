"""What can be done to a rank: a row and a function each.

Each calls ``tell`` once, which leaves the proof on the disk: before the deed if nothing can be
written after it, else when the deed is done, with what was hit.
"""

import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from equipoise.fault.drill.facts import spares
from equipoise.fault.drill.injection import Injection
from equipoise.observe.links import open_sockets

_MAX_PACING_RATE = 47
"""``SO_MAX_PACING_RATE`` of Linux, which Python's ``socket`` lacks."""


class Struck(Protocol):
    """The rank that an act strikes."""

    trainer: Any
    """A ``train.loop.Trainer``."""
    kept: list[Any]
    """What is never freed."""

    def each_phase(self, again: Callable[[str, int], None]) -> None:
        """Call a function at each phase from now on."""


SAVE_POINTS = (
    ("its folder", "os.mkdir", ".saving-"),
    ("the shard", "open", "shard-"),
    ("the report that it is whole", "os.rename", ".report-"),
    ("the tensors' places", "open", "tensors.json"),
    ("the manifest", "open", "manifest.json"),
    ("the end of reports", "os.remove", "report-"),
    ("its name", "os.rename", ".saving-"),
)
"""Steps of a save before which a rank is killed: what is about to be made, the event by which the
interpreter reports it, and how the file's name begins. All ranks come to the first three, and rank
0 alone to the others."""

SHARED_POINTS = 3
"""The first of ``SAVE_POINTS``, to which every rank comes."""

_LOOK_S = 0.1

Tell = Callable[..., None]
Act = Callable[[Struck, Injection, Tell], None]


def _mark(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Only say that the place is reached, for what a drill does from outside."""
    del struck, injection
    tell()


def _kill(struck: Struck, injection: Injection, tell: Tell) -> None:
    """End this process as the kernel does when memory runs out."""
    del struck, injection
    tell()
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_when_ready(struck: Struck, injection: Injection, tell: Tell) -> None:
    """The same, once ranks of the next start are ready to take the places."""
    trainer = struck.trainer
    while len(spares(trainer.folder)) < trainer.ranks.world:
        time.sleep(_LOOK_S)
    _kill(struck, injection, tell)


def _kill_in_save(struck: Struck, injection: Injection, tell: Tell) -> None:
    """End this process right before it does something to a file of the checkpoint that begins.

    The interpreter reports each such call before it is made (PEP 578), in every thread.
    """
    del struck
    name, event, start = SAVE_POINTS[int(injection.amount)]
    has_told: list[bool] = []

    def look(called: str, arguments: tuple[Any, ...]) -> None:
        if called != event or has_told or not arguments or not _begins(arguments[0], start):
            return
        has_told.append(True)
        tell(name)
        os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def _begins(path: object, start: str) -> bool:
    return isinstance(path, str) and Path(path).name.startswith(start)


def _stop(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Stop this process; only a signal from outside lets it go on."""
    del struck, injection
    tell()
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Compute longer in every forward pass, by ``amount`` of the median step."""
    trainer = struck.trainer

    def burn(phase: str, step: int) -> None:
        del step
        until = time.perf_counter() + injection.amount * trainer.saves.rhythm.step_s
        while phase == "forward" and time.perf_counter() < until:
            pass

    struck.each_phase(burn)
    tell()


def _exhaust(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Limit this process to the memory that it has, and leave less than ``amount`` of it free."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    tell()
    limit = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    ballast, size = [], 64 << 20
    while size >= injection.amount:
        try:
            ballast.append(torch.ones(size // 4))
        except (RuntimeError, MemoryError):
            size //= 2
    struck.kept.append(ballast)


def _fill_disk(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Let no file of this process grow, for ``amount`` steps."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    begin: list[int] = []

    def free(phase: str, step: int) -> None:
        del phase
        begin.append(step)
        if step >= begin[0] + injection.amount:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    tell()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    struck.each_phase(free)


def _lock_folder(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Let nothing be made in the folder of checkpoints, for ``amount`` steps."""
    folder: Path = struck.trainer.checkpoints
    folder.mkdir(exist_ok=True)
    mode = folder.stat().st_mode
    begin: list[int] = []

    def unlock(phase: str, step: int) -> None:
        del phase
        begin.append(step)
        if step >= begin[0] + injection.amount:
            folder.chmod(mode)

    folder.chmod(0o555)
    tell()
    struck.each_phase(unlock)


def _spoil_output(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Let a module of the first layer put out NaN from now on, so that losses are."""
    del injection
    name = _first_layer(struck)[0].rpartition(".")[0]

    def spoil(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        del module, given
        return output * float("nan")

    struck.trainer.runner.model.decoder.get_submodule(name).register_forward_hook(spoil)
    tell(name)


def _spoil_gradient(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Make one number of a gradient of the first layer NaN; the loss is finite."""
    del injection
    name, weight = _first_layer(struck)
    _local(weight.grad).view(-1)[0] = float("nan")
    tell(name)


def _flip_weight(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Flip bit ``amount`` of a weight of the first layer."""
    name, weight = _first_layer(struck)
    _flip(weight, int(injection.amount))
    tell(name)


def _flip_moment(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Flip bit ``amount`` of an optimizer's moment of the first layer."""
    name, weight = _first_layer(struck)
    _flip(struck.trainer.runner.optimizer.state[weight]["exp_avg"], int(injection.amount))
    tell(name)


def _shift_data(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Let this rank plan its next steps from documents that are not due yet."""
    del injection
    trainer = struck.trainer
    trainer.position.tokens += trainer.spec.pack.step_tokens
    tell()


def _narrow(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Let the kernel send no more than ``amount`` bytes a second over each connection."""
    del struck
    pace(open_sockets(), injection.amount)
    tell()


def pace(connections: Iterable[socket.socket], rate: float) -> None:
    """Limit what TCP connections of this process send, in bytes a second.

    It needs no right and no network interface: TCP paces itself since Linux 4.13.
    """
    for connection in connections:
        if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("I", int(rate)))


def _cut_in(struck: Struck, injection: Injection, tell: Tell) -> None:
    """Call a collective that no other rank calls."""
    del struck, injection
    tell()
    dist.all_reduce(torch.zeros(3))


ACTS: dict[str, Act] = {
    "mark": _mark,
    "kill": _kill,
    "kill-when-ready": _kill_when_ready,
    "kill-in-save": _kill_in_save,
    "stop": _stop,
    "slow": _slow,
    "narrow": _narrow,
    "cut-in": _cut_in,
    "exhaust": _exhaust,
    "fill-disk": _fill_disk,
    "lock-folder": _lock_folder,
    "spoil-output": _spoil_output,
    "spoil-gradient": _spoil_gradient,
    "flip-weight": _flip_weight,
    "flip-moment": _flip_moment,
    "shift-data": _shift_data,
}
"""By the names that injections have."""


def _first_layer(struck: Struck) -> tuple[str, torch.nn.Parameter]:
    """The first weight of this rank's first layer that it holds a part of."""
    named = struck.trainer.runner.model.decoder.named_parameters()
    held = [(name, weight) for name, weight in named if _local(weight).numel()]
    in_layers = [(name, weight) for name, weight in held if any(map(str.isdigit, name))]
    first: tuple[str, torch.nn.Parameter] = (in_layers or held)[0]
    return first


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flip(tensor: torch.Tensor, bit: int) -> None:
    with torch.no_grad():
        _local(tensor).view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
