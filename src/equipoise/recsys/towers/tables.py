"""Tables in towers: as ``ShardedTables``, with a module on the way from a host to the samples.

Why
    Pooled rows of all tables cross between hosts in every step. Tables that lie together on a host
    can be condensed there first: links between hosts then carry less, and join ranks of equal
    place only.

What it decides
    A module is copied to the ranks of its host, whose gradients of it are summed among them alone.
    Its optimizer is Adam with the rate of the dense part. ``step`` updates modules and rows.

Kept true (tests/multi/recsys/test_towers.py)
    Loss and every gradient equal one process's with any module; towers that pass vectors on equal
    the flat model to the bit; a checkpoint goes on under another number of hosts.

Sources
    L. Luo et al., "Disaggregated Multi-Tower", arXiv:2403.00877.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.base.errors import LayoutError
from equipoise.recsys.ahead.delivery import Batch, Delivered, Delivery
from equipoise.recsys.embedding import ShardedTables, scale_sums
from equipoise.recsys.exchange import TableExchange
from equipoise.recsys.jagged import KeyedJagged
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.rank.scorer import run_tiles
from equipoise.recsys.shard import RowKeeping
from equipoise.recsys.store import load_moments
from equipoise.recsys.towers.modules import TowerModule, make_module
from equipoise.recsys.towers.returns import TowerReturns
from equipoise.schedule.tables.placement import TablePlan, TowerPlacement
from equipoise.schedule.tables.traffic import Wire
from equipoise.spec.recommend import RecommendSpec
from equipoise.spec.towers import TowerSizes


@dataclass(slots=True, eq=False)
class _Tower:
    """A tower of this host."""

    placement: TowerPlacement
    module: TowerModule
    optimizer: torch.optim.Optimizer | None
    """None where the module has no weights."""


@dataclass(slots=True, eq=False)
class _Forward:
    """What a backward needs of its forward."""

    batch: Delivered
    lengths: dict[str, Tensor | None]
    """Ids of each bag, for each table of this host that pools by mean."""
    entered: dict[int, Tensor] = field(default_factory=dict)
    """What each tower read, float32 [samples served, F, W]."""
    left: dict[int, Tensor] = field(default_factory=dict)
    """What came out of it."""


class TowerTables(ShardedTables):
    """This rank's shards of tables in towers, and its copies of their modules."""

    def __init__(
        self,
        plan: TablePlan,
        exchange: TableExchange,
        step: SparseStep,
        sizes: TowerSizes,
        *,
        seed: int = 0,
        forward: Wire = "fp32",
        backward: Wire = "fp32",
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        kept: RowKeeping | None = None,
    ) -> None:
        """Draw this rank's weights.

        Args:
            plan: Where tables and towers lie.
            exchange: Among as many ranks as the plan has.
            step: The sparse optimizer of all tables.
            sizes: The modules.
            seed: Of the first weights.
            forward: How pooled rows and what towers make of them travel.
            backward: How their gradients travel.
            lr: Of the modules' Adam.
            weight_decay: Of it.
            kept: As for ``ShardedTables``.

        Raises:
            LayoutError: the plan has no towers, or is of another number of ranks.
        """
        super().__init__(
            plan, exchange, step, seed=seed, forward=forward, backward=backward, kept=kept
        )
        if not plan.towers:
            raise LayoutError("The plan has no towers. Train ShardedTables, or plan towers.")
        self._towers_way = TowerReturns(plan, exchange, forward, backward)
        self.towers: dict[int, _Tower] = {}
        """This host's, by number."""
        self._forward: _Forward | None = None
        """The last one that a backward may follow."""
        for at, tower in self._towers_way.own:
            module = make_module(sizes, len(tower.tables), seed=seed, tower=at)
            weights = list(module.parameters())
            adam = torch.optim.Adam(weights, lr=lr, weight_decay=weight_decay) if weights else None
            self.towers[at] = _Tower(tower, module, adam)

    def floats(self) -> Iterator[Tensor]:
        """As ``ShardedTables.floats``, and the weights of modules."""
        yield from super().floats()
        for tower in self.towers.values():
            yield from tower.module.parameters()

    def deliver(self, batch: Batch) -> Delivery:
        """As ``ShardedTables.deliver``.

        Raises:
            LayoutError: the batch holds rows that samples share.
        """
        if not isinstance(batch, KeyedJagged):
            raise LayoutError(
                "Towers condense each sample's own rows, and this batch holds rows that samples "
                "share. Give each sample its own."
            )
        return super().deliver(batch)

    def forward(self, passed: Delivered, *, is_training: bool) -> Tensor:
        """Pool, condense, and keep what the backward needs."""
        sums = self.look_up(passed, is_training=is_training)
        sizes = self._sizes(passed)
        gathered = self._towers_way.gather(self.shards, sums, passed.bags, sizes)
        pooling = {each.table.name: each.table.pooling for each in self.plan.placements}
        kept = _Forward(passed, {name: lengths for name, (_, lengths) in gathered.items()})
        outs = {}
        for at, tower in self.towers.items():
            rows = [
                _scale(gathered[name][0], kept.lengths[name], pooling[name])
                for name in tower.placement.tables
            ]
            entered = torch.stack(rows, dim=1).requires_grad_(is_training)
            if is_training:
                with torch.enable_grad():
                    left = tower.module(entered)
                kept.entered[at], kept.left[at] = entered, left
                outs[at] = left.detach()
            else:
                outs[at] = run_tiles(tower.module, entered)
        if is_training:
            self._forward = kept
        return self._towers_way.send_outputs(outs, sizes).flatten(1)

    def backward(self, grad: Tensor, passed: Delivered) -> None:
        """Bring the outputs' gradients through the modules to the rows.

        Raises:
            LayoutError: another forward came in between, or a backward.
        """
        kept, self._forward = self._forward, None
        if kept is None or kept.batch is not passed:
            raise LayoutError(
                "This is not the first backward of the towers' last forward, and they keep what "
                "that one needs. Call forward and backward in turns."
            )
        sizes, width = self._sizes(passed), self.plan.towers[0].width
        cut = grad.view(len(grad), len(self.plan.outputs), width)
        arrived = self._towers_way.return_outputs(cut, sizes)
        pooling = {each.table.name: each.table.pooling for each in self.plan.placements}
        by_table: dict[str, Tensor] = {}
        for at, tower in self.towers.items():
            for weight in tower.module.parameters():
                weight.grad = None
            torch.autograd.backward(kept.left[at], arrived[at])
            entered = kept.entered[at].grad
            if entered is not None:
                for place, name in enumerate(tower.placement.tables):
                    by_table[name] = _scale(entered[:, place], kept.lengths[name], pooling[name])
        self.keep_gradients(self._towers_way.spread(self.shards, by_table, sizes), {}, passed)

    def step(self, lr: float | None = None) -> None:
        """Apply each gradient once; all ranks call it together after a backward."""
        super().step(lr)
        weights = [w for tower in self.towers.values() for w in tower.module.parameters()]
        if not any(tower.weights for tower in self.plan.towers):
            return
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = torch.cat([grad.flatten() for grad in grads])
        summed = self._towers_way.sum_modules(flat).split([w.numel() for w in weights])
        for weight, part in zip(weights, summed, strict=True):
            weight.grad = part.view_as(weight).clone()
        for tower in self.towers.values():
            if tower.optimizer is not None:
                tower.optimizer.step()

    def parts(self) -> dict[str, dict[str, Any]]:
        """States of this host's modules and their optimizers; one rank of it gives them."""
        if self.exchange.rank % self.plan.per_host:
            return {}
        return {
            tower_name(at): {
                "module": tower.module.state_dict(),
                "optimizer": {} if tower.optimizer is None else tower.optimizer.state_dict(),
            }
            for at, tower in self.towers.items()
        }

    def part_names(self) -> list[str]:
        """Names of such states over all hosts."""
        return [tower_name(at) for at in range(len(self.plan.towers))]

    def load_parts(self, read: Callable[[str], Mapping[str, Any]]) -> None:
        """Take the modules of this host from a checkpoint of any layout."""
        for at, tower in self.towers.items():
            state = read(tower_name(at))
            tower.module.load_state_dict(state["module"])
            if tower.optimizer is not None:
                load_moments(tower.optimizer, state["optimizer"])

    def _sizes(self, passed: Delivered) -> list[int]:
        """Samples of each rank."""
        return passed.sizes[self.plan.placements[0].table.name]


def make_tables(
    spec: RecommendSpec,
    plan: TablePlan,
    exchange: TableExchange,
    step: SparseStep,
    kept: RowKeeping | None,
) -> ShardedTables:
    """The tables of a run, in towers where it has some; arguments are those of the classes."""
    seed, wire, train = spec.train.seed, spec.tables.wire, spec.train
    if not plan.towers:
        return ShardedTables(
            plan, exchange, step, seed=seed, forward=wire, backward=wire, kept=kept
        )
    return TowerTables(
        plan,
        exchange,
        step,
        spec.model.tower_sizes,
        seed=seed,
        forward=wire,
        backward=wire,
        lr=train.lr,
        weight_decay=train.weight_decay,
        kept=kept,
    )


def _scale(rows: Tensor, lengths: Tensor | None, pooling: str) -> Tensor:
    """Sums of bags, or gradients of them, as the table pools."""
    return rows if lengths is None else scale_sums(rows, lengths, pooling)


def tower_name(tower: int) -> str:
    """Under which a checkpoint has the state of a tower's module."""
    return f"tower-{tower:03d}"
