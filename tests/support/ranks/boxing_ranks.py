"""Dense tensors, their parts, and the redistributions that ranks run in these tests."""

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from equipoise.comm.group import Ranks
from equipoise.comm.mail import Mail
from equipoise.parallel.boxing.redistribute import redistribute
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.boxing.path import BoxingRequest, BoxingSchedule
from equipoise.schedule.boxing.placement import (
    Broadcast,
    MeshTensor,
    Partial,
    Placement,
    Placements,
    SplitDim,
    coordinates,
)

SLOW, FAST = LinkPrice(1e-5, 1e9), LinkPrice(1e-6, 1e10)


def request(
    on: MeshTensor, before: Placements, after: Placements, element_bytes: int = 8
) -> BoxingRequest:
    links = (SLOW, FAST, FAST, FAST)[: len(on.mesh)]
    return BoxingRequest(on, before, after, element_bytes, links)


def whole_of(on: MeshTensor) -> Tensor:
    """A dense tensor of whole numbers, all different, so that sums are exact in any order."""
    return torch.arange(1, 1 + math.prod(on.shape)).view(on.shape).double()


def placements_of(*choices: list[Placement]) -> list[Placements]:
    """Every choice for every axis that is not partial in two ways at once."""
    return [
        each
        for each in itertools.product(*choices)
        if len({p for p in each if isinstance(p, Partial)}) < 2
    ]


def _partial_axes(placements: Placements) -> tuple[list[int], str]:
    axes = [axis for axis, each in enumerate(placements) if isinstance(each, Partial)]
    return axes, placements[axes[0]].reduce if axes else "sum"


def parts_of(whole: Tensor, on: MeshTensor, placements: Placements) -> list[Tensor]:
    """The part of each rank; parts of a sum or of a maximum are made up."""
    generator = torch.Generator().manual_seed(0)
    axes, reduce = _partial_axes(placements)
    keys = list(np.ndindex(*(on.mesh[axis] for axis in axes)))
    holder = torch.randint(len(keys), whole.shape, generator=generator)
    terms, left = {}, whole.clone()
    for number, key in enumerate(keys):
        noise = torch.randint(-9, 10, whole.shape, generator=generator).to(whole.dtype)
        if reduce == "max":
            terms[key] = torch.where(holder == number, whole, whole - noise.abs())
        else:
            terms[key] = left if number == len(keys) - 1 else noise
            left = left - terms[key]
    return [
        terms[tuple(place[axes].tolist())][tuple(slice(*dim) for dim in box.tolist())].clone()
        for place, box in zip(coordinates(on.mesh), on.boxes(placements), strict=True)
    ]


def joined(parts: list[Tensor], on: MeshTensor, placements: Placements) -> Tensor:
    """The dense tensor behind parts; copies must be equal, and nothing may be missing."""
    axes, reduce = _partial_axes(placements)
    terms: dict[tuple[int, ...], Tensor] = {}
    known: dict[tuple[int, ...], Tensor] = {}
    rows = zip(parts, coordinates(on.mesh), on.boxes(placements), strict=True)
    for part, place, box in rows:
        key = tuple(place[axes].tolist())
        index = tuple(slice(*dim) for dim in box.tolist())
        term = terms.setdefault(key, part.new_zeros(on.shape))
        seen = known.setdefault(key, torch.zeros(on.shape, dtype=torch.bool))
        assert part.shape == term[index].shape, placements
        assert torch.equal(term[index][seen[index]], part[seen[index]]), placements
        term[index], seen[index] = part, True
    assert all(bool(seen.all()) for seen in known.values()), placements
    stacked = torch.stack(list(terms.values()))
    return stacked.sum(0) if reduce == "sum" else stacked.max(0).values


# What ranks run. --------------------------------------------------------------------------------


def redistribute_all(
    ranks: Ranks, schedules: list[BoxingSchedule]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """This rank's part under each schedule, and the bytes sent to and received from each rank."""
    results = []
    for schedule in schedules:
        mail = Mail()
        part = parts_of(whole_of(schedule.on), schedule.on, schedule.before)[ranks.rank]
        out = redistribute(part, schedule, mail)
        results.append((out.numpy(), mail.ledger.sent_bytes, mail.ledger.received_bytes))
    return results


def gradients(ranks: Ranks, pairs: list[tuple[BoxingSchedule, BoxingSchedule]]) -> list[np.ndarray]:
    """The gradient of this rank's part, where the result's gradient is a part of ``whole_of``."""
    grads = []
    for schedule, backward in pairs:
        whole = whole_of(schedule.on)
        part = parts_of(whole, schedule.on, schedule.before)[ranks.rank].requires_grad_()
        out = redistribute(part, schedule, Mail(), backward=backward)
        out.backward(parts_of(whole, schedule.on, backward.before)[ranks.rank])
        grads.append(part.grad.numpy())
    return grads


def halves_of_a_loss(
    ranks: Ranks, schedules: tuple[BoxingSchedule, BoxingSchedule]
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient through two redistributions, and through the dense tensor.

    The loss is the sum over ranks of ``w * y * y``, with other weights ``w`` on each rank.
    """
    schedule, backward = schedules
    on = schedule.on
    weights = [torch.rand(4, 6, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    box = on.boxes(schedule.before)[ranks.rank].tolist()
    dense = torch.rand(4, 6, generator=torch.Generator().manual_seed(9)).requires_grad_()
    part = dense.detach()[tuple(slice(*dim) for dim in box)].clone().requires_grad_()
    y = redistribute(part, schedule, Mail(), backward=backward)
    (weights[ranks.rank] * y * y).sum().backward()
    sum((w * dense * dense).sum() for w in weights).backward()
    return part.grad.numpy(), dense.grad[tuple(slice(*dim) for dim in box)].numpy()


def sum_floats(ranks: Ranks, schedule: BoxingSchedule) -> np.ndarray:
    """Parts whose sum differs with every order of adding."""
    part = torch.rand(schedule.on.shape, generator=torch.Generator().manual_seed(ranks.rank))
    return redistribute(part, schedule, Mail()).numpy()


def redistribute_wrongly(
    ranks: Ranks,
    schedule: BoxingSchedule,
    shape: list[int],
    dtype: torch.dtype,
    backward: BoxingSchedule | None = None,
) -> None:
    redistribute(torch.zeros(shape, dtype=dtype), schedule, Mail(), backward=backward)


ONE_AXIS: list[Placement] = [
    SplitDim(0),
    SplitDim(1),
    SplitDim(0, (3, 0, 2)),
    SplitDim(1, (0, 0, 1)),
    Broadcast(),
    Partial(),
    Partial("max"),
]
