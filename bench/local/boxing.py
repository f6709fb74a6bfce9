"""Tensors redistributed on gloo ranks: ours against ``DTensor.redistribute``, bytes and seconds.

Both sides run in the same processes in random order, each on parts that it already has; ours plans
beforehand, as a run does. A round takes as long as its slowest rank. Our bytes come from the
ledger, summed over ranks. torch's are the least that its collectives can send, counted from the
sizes that it passes them: (n-1)/n of what is gathered, scattered or exchanged, and twice that for
an all-reduce. The prediction uses links measured just before, with messages between two otherwise
idle ranks. Packing is measured by itself, in one process.
"""

import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mail import Mail
from equipoise.parallel.boxing.blocks import block_of, pack, view_of
from equipoise.parallel.boxing.redistribute import redistribute
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.boxing.path import BoxingRequest, plan_boxing
from equipoise.schedule.boxing.placement import (
    Broadcast,
    MeshTensor,
    Placements,
    SplitDim,
    read_placements,
)

ROUNDS, WARM = 15, 3
SHAPES = {"even": (4096, 1024), "uneven": (4097, 1023)}
CASES = {
    (2,): ("S(0) -> B", "S(0) -> S(1)", "P -> S(0)", "P -> B"),
    (2, 2): (
        "S(0), P -> B, S(1)",
        "P, P -> B, B",
        "S(0), S(1) -> S(1), S(0)",
        "S(0), S(0) -> B, S(0)",
    ),
}


def _theirs(placements: Placements) -> list[Placement]:
    simple = {Broadcast(): Replicate()}
    return [
        Shard(each.dim) if isinstance(each, SplitDim) else simple.get(each, Partial())
        for each in placements
    ]


def _wait(tensor: Tensor) -> Tensor:
    """A collective's result once it is there."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class _Counter(TorchDispatchMode):
    """The least bytes that this rank must send in the collectives that it joins."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0.0
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kind = func.name().partition("::")[2].partition(".")[0]
        if kind.startswith(("all_", "reduce_scatter")) and isinstance(args[-1], str):
            ranks = dist.get_world_size(dist.distributed_c10d._resolve_process_group(args[-1]))
            share = (ranks - 1) / ranks
            times = {"all_reduce": 2 * share, "all_gather_into_tensor": ranks - 1}
            self.sent_bytes += args[0].nbytes * times.get(kind, share)
            self.collectives.append(kind)
        return func(*args, **(kwargs or {}))


def _link(ranks: Ranks) -> LinkPrice:
    """The link of ranks 0 and 1, one way: latency from small messages, bandwidth from large."""
    times = {}
    for size, count in ((8, 60), (1 << 24, 8)):
        data = torch.zeros(size, dtype=torch.uint8)
        taken = []
        ranks.barrier()
        for _ in range(count if ranks.rank < 2 else 0):
            began = time.perf_counter()
            if ranks.rank == 0:
                dist.send(data, 1)
                dist.recv(data, 1)
            else:
                dist.recv(data, 0)
                dist.send(data, 0)
            taken.append((time.perf_counter() - began) / 2)
        times[size] = statistics.median(taken[2:]) if taken else 0.0
        ranks.barrier()
    small, large = ranks.gather_floats(list(times.values()))[0].tolist()
    return LinkPrice(small, (1 << 24) / max(large - small, 1e-9))


def _case(ranks: Ranks, mesh: tuple[int, ...], words: str, shape: tuple[int, int]) -> object:
    link = _link(ranks)
    before, after = map(read_placements, words.split("->"))
    on = MeshTensor(shape, mesh)
    schedule = plan_boxing(BoxingRequest(on, before, after, 4, (link,) * len(mesh)))
    box = on.boxes(before)[ranks.rank].tolist()
    part = torch.randn([stop - first for first, stop in box])
    # It warns that some of these redistributions take more collectives than necessary.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    device_mesh = init_device_mesh("cpu", mesh)
    tensor = DTensor.from_local(
        part, device_mesh, _theirs(before), run_check=False, shape=shape, stride=(shape[1], 1)
    )
    mail = Mail()
    sides: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: redistribute(part, schedule, mail),
        "DTensor": lambda: _wait(tensor.redistribute(device_mesh, _theirs(after)).to_local()),
    }
    one, two = (side() for side in sides.values())
    if not torch.allclose(one, two, atol=1e-4):
        raise AssertionError(f"{words}: the sides differ")
    mail.ledger.sent_bytes[:] = 0
    sides["ours"]()
    with _Counter() as counter:
        sides["DTensor"]()
    ours_bytes = int(ranks.sum_(mail.ledger.sent_bytes.sum() + torch.zeros((), dtype=torch.int64)))
    theirs_bytes = int(ranks.sum_(torch.tensor(counter.sent_bytes, dtype=torch.float64)))
    walls: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    order = random.Random(0)
    for number in range(ROUNDS + WARM):
        for side in order.sample(list(sides), len(sides)):
            ranks.barrier()
            began, busy = time.perf_counter(), time.process_time()
            sides[side]()
            row = [time.perf_counter() - began, time.process_time() - busy]
            wall, spent = ranks.gather_floats(row).max(0).values.tolist()
            if number >= WARM:
                walls[side].append(wall)
                cpu[side].append(spent)
    return {
        "path": str(schedule),
        "steps": [each.step.words for each in schedule.steps],
        "link": {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s},
        "predicted_s": schedule.seconds,
        "predicted_bytes": schedule.sent_bytes,
        "sent_bytes": {"ours": ours_bytes, "DTensor": theirs_bytes},
        "DTensor_collectives": counter.collectives,
        "wall_s": {side: spread(times) for side, times in walls.items()},
        "process_cpu_s": {side: spread(times) for side, times in cpu.items()},
        "DTensor_over_ours": statistics.median(walls["DTensor"]) / statistics.median(walls["ours"]),
        "cpu_s": time.process_time(),
    }


def _packing() -> dict[str, object]:
    """The columns that 7 other ranks of 8 get, packed by one copy, by seven, and by ``cat``."""
    tensor = torch.randn(2048, 2048)
    boxes = [[(0, 2048), (256 * rank, 256 * rank + 256)] for rank in range(1, 8)]
    blocks = [block_of(tensor, box) for box in boxes]

    def piece_by_piece() -> Tensor:
        packed = tensor.new_empty(sum(block.elements for block in blocks))
        for part, block in zip(packed.split(blocks[0].elements), blocks, strict=True):
            view = view_of(tensor, block)
            part.view(view.shape).copy_(view)
        return packed

    sides: dict[str, Callable[[], Tensor]] = {
        "one copy": lambda: pack(tensor, blocks),
        "a copy each": piece_by_piece,
        "cat": lambda: torch.cat([tensor[:, first:stop].reshape(-1) for _, (first, stop) in boxes]),
    }
    if not all(torch.equal(side(), pack(tensor, blocks)) for side in sides.values()):
        raise AssertionError("the sides differ")
    taken: dict[str, list[float]] = {side: [] for side in sides}
    order = random.Random(0)
    for number in range(ROUNDS + WARM):
        for side in order.sample(list(sides), len(sides)):
            began = time.thread_time()
            sides[side]()
            if number >= WARM:
                taken[side].append(time.thread_time() - began)
    return {side: spread(times) for side, times in taken.items()}


def _cases(ranks: Ranks, mesh: tuple[int, ...]) -> dict[str, object]:
    return {
        f"{words}, {kind}": _case(ranks, mesh, words, shape)
        for words in CASES[mesh]
        for kind, shape in SHAPES.items()
    }


def measure() -> dict[str, object]:
    """Run all cases and return their figures."""
    stamp = LoadStamp()
    meshes, ranks_s = {}, 0.0
    for mesh in CASES:
        count = torch.Size(mesh).numel()
        rows = run_ranks(count, _cases, mesh)[0]
        ranks_s += count * max(row.pop("cpu_s") for row in rows.values())  # type: ignore[attr-defined]
        meshes["x".join(map(str, mesh))] = rows
    return {
        "bench": "boxing",
        "what": "fp32 tensors of 16 MiB, CPU ranks over gloo; a round's time is the last rank's",
        "environment": environment(),
        "packing_cpu_s": _packing(),
        "meshes": meshes,
        "other_load_cores": stamp.other_load(ranks_s),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
