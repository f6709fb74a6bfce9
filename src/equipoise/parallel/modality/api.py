"""Encoders beside a decoder on a mesh of their own: items spread over all ranks, by work.

Why
    Images and sound cost by their own size, not by the tokens of the documents that have them.
    Encoded where their documents are, one rank encodes while others wait; encoded where the work
    is even, nobody does, whatever the decoder's layout is.

What it decides
    Every rank encodes whole items. Weights are sharded over all ranks (``modality.shard``), and
    gathered for that. A step has three phases around the decoder's own::

        plan     deal the items, compare the plan's digest
        encode   each rank its items, packed; rows cross the bridge to leaves of the decoder
        (step)   the decoder's micro-batches, in any layout, with rows in place of stand-ins
        return   gradients of the leaves cross back; encoders run their backward; all ranks sum

    A rank runs every encoder, without items if it has none of that kind.

    Weights change afterwards, with the decoder's, in one step of one optimizer under one norm.

    A frozen encoder ends with its forward: no gradient of its rows is sent back. As long as some
    encoder is trained, every micro-batch gets rows that need a gradient, zero rows if it has no
    item, so that all ranks run the same backward.

Kept true (tests/multi/parallel/test_modality.py)
    Loss and every gradient of encoder and decoder equal one rank's, for items of any size, ranks
    without an item and documents without any.

Sources
    Modality-decoupled parallelism: LongCat-Flash-Omni, arXiv:2511.00279.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from equipoise.balance.modality.step import ModalityStep, plan_step
from equipoise.base.arrays import Floats, Ints
from equipoise.comm.group import Ranks
from equipoise.comm.meter import WaitMeter
from equipoise.nn.device.send import send
from equipoise.nn.modality.encoder import ItemEncoder
from equipoise.nn.modality.insert import Inserted
from equipoise.observe.machine import run_delay_s
from equipoise.parallel.modality.executor import carry, carry_back
from equipoise.parallel.modality.program import require_one_bridge
from equipoise.parallel.modality.shard import ShardedEncoders
from equipoise.schedule.modality.readers import Embeds
from equipoise.spec.modality.encoder import KINDS, EncoderSpec
from equipoise.spec.modality.items import Items
from equipoise.spec.pack import PackedStep


def _clocks_s(meter: WaitMeter) -> Floats:
    """Seconds of this rank, by three clocks, float64 [3].

    One stands still while the rank waits for encoders' weights; one also while other programs have
    its core, where that is known; one runs in those waits alone.
    """
    now_s, delay_s = time.perf_counter() - meter.waited_s, run_delay_s() - meter.delay_s
    return np.array([now_s, now_s - (0 if math.isnan(delay_s) else delay_s), meter.waited_s])


@dataclass(slots=True, eq=False)
class EncodedStep:
    """One rank's share of a step's items, between their forward and their backward."""

    step: ModalityStep
    sent_MD: Tensor
    """Rows that this rank encoded, as they were sent; with their graph."""
    order: dict[int, Tensor]
    """Which of the rows that arrived belong to each of its micro-batches."""
    inserted: dict[int, Inserted]
    """Rows of each of its micro-batches that has any."""
    none: Inserted | None
    """Zero rows for every other micro-batch, where rows need a gradient; else None."""
    arrived: int
    """Rows that this rank reads."""
    took_s: Floats
    """Seconds of its encoders, forward and later backward; those of them in which it had its core;
    and seconds of the bridge and of gathering weights, waits included, float64 [3]."""

    def of_turn(self, turn: int) -> Inserted | None:
        """The rows of one of this rank's micro-batches."""
        return self.inserted.get(turn, self.none)


@dataclass(frozen=True, slots=True, eq=False)
class Modality:
    """The encoders of a run on this rank."""

    sharded: ShardedEncoders
    items: Items
    documents: int
    """Documents of the corpus."""
    ranks: Ranks

    def plan(self, packed: PackedStep, step: int, embeds: Embeds) -> ModalityStep:
        """Deal a step's items and agree on it; every rank calls it.

        Raises:
            LayoutError: ranks dealt otherwise.
        """
        planned = plan_step(
            packed,
            self.items,
            self.documents,
            embeds,
            self.specs,
            ranks=self.ranks.world,
            width=self._width,
            element_bytes=self.element_bytes,
        )
        require_one_bridge(planned.plan, step, self.ranks)
        return planned

    def encode(self, step: ModalityStep) -> EncodedStep:
        """Encode this rank's items and send their rows to whoever reads them; every rank calls it.

        Without gradients, weights are freed at once.
        """
        rank, plan, readers = self.ranks.rank, step.plan, step.plan.readers
        began_s = _clocks_s(self.sharded.meter)
        rows_ND, starts = self._forward(step.own(rank), list(self._encoders))
        if torch.is_grad_enabled():
            self.sharded.free_frozen()
        mine = np.flatnonzero(plan.owner[readers.item] == rank)
        first = np.zeros(len(plan.owner), dtype=np.int64)
        first[plan.items_of(rank)] = starts
        at = first[readers.item[mine]] + readers.item_row[mine]
        sent_MD = rows_ND[self._send(at)]
        if not torch.is_grad_enabled():
            self.sharded.free_gathered()
        took_s = _clocks_s(self.sharded.meter) - began_s
        began = time.perf_counter()
        arrived_KD = carry(sent_MD.detach(), plan, rank, self.sharded.ledger)
        took_s[2] += time.perf_counter() - began
        here = np.flatnonzero(readers.rank == rank)
        needs = step.returns and torch.is_grad_enabled()
        order, inserted = {}, {}
        for turn in np.unique(readers.turn[here]).tolist():
            these = np.flatnonzero(readers.turn[here] == turn)
            these = these[np.argsort(readers.row[here][these])]
            order[turn] = self._send(these)
            leaf_ND = arrived_KD[order[turn]].requires_grad_(needs)
            inserted[turn] = Inserted(self._send(readers.row[here][these]), leaf_ND)
        no_rows_ND = arrived_KD.new_zeros(0, self._width, requires_grad=True)
        none = Inserted(self._send(here[:0]), no_rows_ND) if needs else None
        return EncodedStep(step, sent_MD, order, inserted, none, len(here), took_s)

    def return_gradients(self, encoded: EncodedStep) -> None:
        """Send gradients of rows back, and run the encoders' backward; every rank calls it.

        From stage 2 of ZeRO on it also sums their gradients over all ranks. It does nothing if no
        encoder is trained.
        """
        step, rank = encoded.step, self.ranks.rank
        if not step.returns:
            return
        grads_KD = encoded.sent_MD.new_zeros(encoded.arrived, self._width)
        for turn, inserted in encoded.inserted.items():
            if inserted.rows_ND.grad is not None:
                grads_KD[encoded.order[turn]] = inserted.rows_ND.grad
        began = time.perf_counter()
        if step.back is step.plan:
            back_MD = carry_back(grads_KD, step.plan, rank, self.sharded.ledger)
        else:  # rows of frozen encoders have no graph, so any gradient does
            read, sent = self._returning(step)
            back_MD = torch.zeros_like(encoded.sent_MD)
            back_MD[sent] = carry_back(grads_KD[read], step.back, rank, self.sharded.ledger)
        encoded.took_s[2] += time.perf_counter() - began
        began_s = _clocks_s(self.sharded.meter)
        self.sharded.prepare_micro_batch(last=not self.sharded.sums_at_end)
        encoded.sent_MD.backward(back_MD)
        encoded.took_s += _clocks_s(self.sharded.meter) - began_s

    def sum_gradients(self) -> None:
        """Sum what gradients the backward left, and free all weights; every rank calls it."""
        trained = [kind for kind, each in self._encoders.items() if not each.spec.is_frozen]
        if self.sharded.sums_at_end and trained:
            self.sharded.prepare_micro_batch(last=True)
            none_ND, _ = self._forward(np.zeros(0, dtype=np.int64), trained)
            none_ND.sum().backward()
        self.sharded.free_gathered()

    @property
    def specs(self) -> tuple[EncoderSpec, ...]:
        """Sizes of the encoders."""
        return tuple(each.spec for each in self._encoders.values())

    @property
    def element_bytes(self) -> int:
        """Size of a weight, and of a number of a row [bytes]."""
        return next(self.sharded.encoders.parameters()).element_size()

    @property
    def _encoders(self) -> dict[str, ItemEncoder]:
        return {kind: cast(ItemEncoder, each) for kind, each in self.sharded.encoders.items()}

    @property
    def _width(self) -> int:
        return next(iter(self._encoders.values())).width

    def _returning(self, step: ModalityStep) -> tuple[Tensor, Tensor]:
        """Which rows that this rank reads have gradients that return, and which that it sent."""
        readers, rank = step.plan.readers, self.ranks.rank
        read = np.flatnonzero(step.returning[readers.rank == rank])
        sent = np.flatnonzero(step.returning[step.plan.owner[readers.item] == rank])
        return self._send(read), self._send(sent)

    def _forward(self, own: Ints, kinds: Sequence[str]) -> tuple[Tensor, Ints]:
        """Rows of items of the corpus, kind by kind, and where each item's begin."""
        like = next(self.sharded.encoders.parameters())
        starts, parts, before = np.zeros(len(own), dtype=np.int64), [], 0
        for name in kinds:
            encoder = self._encoders[name]
            these = np.flatnonzero(self.items.kind[own] == KINDS.index(name))
            # By size, so that items of one size are one call of attention.
            these = these[np.argsort(self.items.patches[own[these]], kind="stable")]
            chosen = own[these]
            none = np.zeros((0, encoder.spec.values), dtype=np.float32)
            patches = np.concatenate([none, *map(self.items.load, chosen.tolist())])
            patches_PC = send(torch.from_numpy(patches), like.device).to(like.dtype)
            grids = [(rows, columns) for rows, columns in self.items.grid[chosen].tolist()]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not encoder.spec.is_frozen):
                parts.append(encoder(patches_PC, grids))
            rows = self.items.rows[chosen]
            starts[these] = before + np.cumsum(rows) - rows
            before += int(rows.sum())
        return torch.cat(parts), starts

    def _send(self, places: Ints) -> Tensor:
        return send(torch.from_numpy(np.ascontiguousarray(places)), self.ranks.device)
