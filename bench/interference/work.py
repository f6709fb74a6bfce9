"""Training steps that neighbours disturb: five workloads, timed in the process that runs them."""

import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from equipoise.fault.interference.sampler import HostSampler
from equipoise.nn.decoder import Decoder, initialize
from equipoise.optim.adamw import make_adamw
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import TrainSpec
from equipoise.train.process import settle

WORKLOADS = ("dense", "wide", "save", "load", "ranks")
"""dense: the demo's model. wide: few tokens of a larger one, so that the optimizer's passes over
memory dominate. save: with a save of 2 MiB, forced to disk, at every other step. load: with a read
of 1 MiB past the page cache. ranks: gradients summed over two ranks by gloo."""

_MIB = 1 << 20


def _step(workload: str, folder: Path) -> Callable[[], None]:
    model = preset("7m" if workload == "wide" else "2m")
    decoder = Decoder(model)
    initialize(decoder, 0)
    optimizer = make_adamw(decoder, TrainSpec())
    text = Path(os.__file__).read_bytes()
    tokens = 32 if workload == "wide" else 192
    ids = torch.tensor(list(text[: tokens + 1]), dtype=torch.int64)
    weights = list(decoder.parameters())

    def compute() -> None:
        loss = decoder(ids[:-1], [tokens], labels_T=ids[1:])
        optimizer.zero_grad()
        loss.backward()
        if workload == "ranks":
            for weight in weights:
                if weight.grad is not None:
                    dist.all_reduce(weight.grad)
        optimizer.step()

    return {"save": _saving(compute, folder), "load": _loading(compute, folder)}.get(
        workload, compute
    )


def _saving(compute: Callable[[], None], folder: Path) -> Callable[[], None]:
    block, count = os.urandom(2 * _MIB), 0

    def step() -> None:
        nonlocal count
        compute()
        count += 1
        if count % 2 == 0:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())

    return step


def _loading(compute: Callable[[], None], folder: Path) -> Callable[[], None]:
    path = folder / f"load-{os.getpid()}"
    path.write_bytes(os.urandom(64 * _MIB))
    os.sync()
    file, buffer, at = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, _MIB), 0
    path.unlink()

    def step() -> None:
        nonlocal at
        os.preadv(file, [buffer], at * _MIB)
        at = (at + 1) % 64
        compute()

    return step


def main() -> None:
    """Run steps until the folder has a file ``stop``; write rows and step times there."""
    workload, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    settle(rank, pin=True)
    if workload == "ranks":
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2
        )
    step, ends = _step(workload, folder), list[float]()
    stop = folder / "stop"
    last = torch.zeros(1)
    with HostSampler() if rank == 0 else nullcontext() as sampler:
        while True:
            step()
            ends.append(time.time())
            if len(ends) % 4 == 0:
                last.fill_(float(stop.exists()))
                if workload == "ranks":
                    dist.all_reduce(last)
                if last.item():
                    break
        rows = [] if sampler is None else sampler.take()
    if rank == 0:
        made = {
            "ends": ends,
            "rows": [[at, *np.nan_to_num(row, nan=-1).tolist()] for at, row in rows],
        }
        (folder / "made.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main()
