"""Where each rank's bytes of a checkpoint go: decided once, by all ranks, before the first save.

What it decides
    Torch's planners say which boxes of which tensors a rank writes, each box on one rank alone,
    replicas spread evenly. A rank lays its boxes end to end in one file, those of wide numbers
    first, so that every box is aligned to its numbers. Places depend on names, shapes and the
    layout, and so does the index of the checkpoint: a save moves bytes and decides nothing.

    Weights and moments change in the optimizer's step alone, so they may be copied during the next
    forward and backward. Buffers may change in a forward; they are copied at once.

Kept true (tests/multi/train/test_checkpoint.py, tests/multi/checkpoint/test_background.py)
    Saved on 2 ranks and loaded on 1 or 3, every tensor is bitwise the same; a tensor that was
    replaced by another is saved as it is now.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.index import Chunk, Index, StoredTensor
from equipoise.checkpoint.manifest import shard_name
from equipoise.comm.group import Ranks


def live_state(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Tensors of both, and the optimizer's groups: settings, which are not saved."""
    state: dict[str, Any] = {
        "model": get_model_state_dict(module),
        "optimizer": get_optimizer_state_dict(module, optimizer),
    }
    return state, state["optimizer"].pop("param_groups")


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a tensor of this rank, and the first of its bytes in the rank's file."""

    tensor: Tensor
    start: int
    is_steady: bool
    """Whether it changes in the optimizer's step alone."""


class Places:
    """This rank's part of every checkpoint, and the index of all of it.

    Args:
        module: Sharded weights.
        optimizer: Its moments.
        ranks: All ranks; each of them makes its own.

    Raises:
        CheckpointError: the state has something that is not a tensor.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        self._module, self._optimizer = module, optimizer
        planner = self._look()
        planner.is_coordinator = ranks.rank == 0
        plans, _ = planner.create_global_plan(ranks.gather_objects(planner.create_local_plan()))
        laid = [_lay_out(plan.items) for plan in plans]
        self._items, self.size_bytes = laid[ranks.rank]
        self.index = _index([items for items, _ in laid])
        self._take(planner)

    def placed(self) -> list[Placed]:
        """The boxes of this rank as they are now, by where they go.

        Raises:
            CheckpointError: the state has changed its shape since places were decided.
        """
        if self._addresses() != self._known:
            self._take(self._look())
        return self._placed

    def _look(self) -> DefaultSavePlanner:
        planner = DefaultSavePlanner()
        planner.set_up_planner(live_state(self._module, self._optimizer)[0])
        return planner

    def _take(self, planner: DefaultSavePlanner) -> None:
        steady = {
            _local(tensor).data_ptr() for tensor in (*self._module.parameters(), *self._moments())
        }
        self._placed = []
        for item, start, size_bytes in self._items:
            try:
                tensor = planner.resolve_data(item)
            except ValueError as error:
                raise CheckpointError(f"{item.index.fqn} has left the state.") from error
            if not isinstance(tensor, Tensor) or tensor.nbytes != size_bytes:
                raise CheckpointError(f"{item.index.fqn} has changed its shape since then.")
            tensor = tensor.detach()
            self._placed.append(Placed(tensor, start, tensor.data_ptr() in steady))
        self._known = self._addresses()

    def _moments(self) -> list[Tensor]:
        states = self._optimizer.state.values()
        return [value for each in states for value in each.values() if isinstance(value, Tensor)]

    @torch.no_grad()
    def _addresses(self) -> list[int]:
        """Where everything lies, to notice that something was replaced by another tensor."""
        weights = [each for group in self._optimizer.param_groups for each in group["params"]]
        held = *weights, *self._moments(), *self._module.buffers()
        return [_local(each).data_ptr() for each in held]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _lay_out(items: list[WriteItem]) -> tuple[list[tuple[WriteItem, int, int]], int]:
    """Each box with its first byte and its size, and the size of all."""
    placed, start = [], 0
    for item in sorted(items, key=_item_bytes, reverse=True):
        size_bytes = _data(item).chunk.sizes.numel() * _item_bytes(item)
        placed.append((item, start, size_bytes))
        start += size_bytes
    return placed, start


def _index(laid: list[list[tuple[WriteItem, int, int]]]) -> Index:
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, items in enumerate(laid):
        for item, start, size_bytes in items:
            data, name = _data(item), item.index.fqn
            box = data.chunk
            kinds[name] = (str(data.properties.dtype).removeprefix("torch."), tuple(data.size))
            chunks.setdefault(name, []).append(
                Chunk(tuple(box.offsets), tuple(box.sizes), shard_name(rank), start, size_bytes)
            )
    return {
        name: StoredTensor(*kinds[name], tuple(sorted(each, key=lambda chunk: chunk.offsets)))
        for name, each in chunks.items()
    }


def _item_bytes(item: WriteItem) -> int:
    return int(_data(item).properties.dtype.itemsize)


def _data(item: WriteItem) -> Any:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor.")
    return item.tensor_data
