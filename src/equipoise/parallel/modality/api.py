"""Encoders beside a decoder on a mesh of their own: items spread over all ranks, by work.

Why
    Images and sound cost by their own size, not by the tokens of the documents that have them.
    Encoded where their documents are, one rank encodes while others wait; encoded where the work
    is even, nobody does, whatever the decoder's layout is.

What it decides
    Encoders are whole on every rank, and items are what is shared. A step has three phases around
    the decoder's own::

        plan     deal the items, compare the plan's digest
        encode   each rank its items, packed; rows cross the bridge to leaves of the decoder
        (step)   the decoder's micro-batches, in any layout, with rows in place of stand-ins
        return   gradients of the leaves cross back; encoders run their backward; all ranks sum

    Weights change afterwards, with the decoder's, in one step of one optimizer under one norm.

Kept true (tests/multi/parallel/test_modality.py)
    Loss and every gradient of encoder and decoder equal one rank's, for items of any size, ranks
    without an item and documents without any.

Sources
    Modality-decoupled parallelism: LongCat-Flash-Omni, arXiv:2511.00279.
"""

import math
import time
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.balance.modality.step import ModalityStep, plan_step
from equipoise.base.arrays import Ints
from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger
from equipoise.nn.device.send import send
from equipoise.nn.modality.encoder import ItemEncoder
from equipoise.nn.modality.insert import Inserted
from equipoise.observe.machine import run_delay_s
from equipoise.parallel.modality.executor import carry, carry_back
from equipoise.parallel.modality.program import require_one_bridge
from equipoise.schedule.modality.readers import Embeds
from equipoise.spec.modality.encoder import KINDS, EncoderSpec
from equipoise.spec.modality.items import Items
from equipoise.spec.pack import PackedStep


def _core_s() -> float:
    """A clock that stands still while other programs have this rank's core, where that is known."""
    delay_s = run_delay_s()
    return time.perf_counter() - (0.0 if math.isnan(delay_s) else delay_s)


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
    arrived: int
    """Rows that this rank reads."""
    encode_s: float
    """Seconds of its encoders, forward and later backward."""
    core_s: float
    """Those of them in which it had its core."""
    bridge_s: float = 0.0
    """Seconds of the bridge, both ways, its waits included."""

    def of_turn(self, turn: int) -> Inserted | None:
        """The rows of one of this rank's micro-batches."""
        return self.inserted.get(turn)


@dataclass(frozen=True, slots=True, eq=False)
class Modality:
    """The encoders of a run on this rank."""

    encoders: nn.ModuleDict
    """By kind of item, whole on every rank."""
    items: Items
    documents: int
    """Documents of the corpus."""
    ranks: Ranks
    ledger: Ledger
    """Bytes that crossed the bridge."""

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
            element_bytes=next(self.encoders.parameters()).element_size(),
        )
        require_one_bridge(planned.plan, step, self.ranks)
        return planned

    def encode(self, step: ModalityStep) -> EncodedStep:
        """Encode this rank's items and send their rows to whoever reads them."""
        rank, plan, readers = self.ranks.rank, step.plan, step.plan.readers
        began, had = time.perf_counter(), _core_s()
        rows_ND, starts = self._forward(step.own(rank))
        mine = np.flatnonzero(plan.owner[readers.item] == rank)
        first = np.zeros(len(plan.owner), dtype=np.int64)
        first[plan.items_of(rank)] = starts
        at = first[readers.item[mine]] + readers.item_row[mine]
        sent_MD = rows_ND[self._send(at)]
        encode_s, core_s = time.perf_counter() - began, _core_s() - had
        began = time.perf_counter()
        arrived_KD = carry(sent_MD.detach(), plan, rank, self.ledger)
        bridge_s = time.perf_counter() - began
        here = np.flatnonzero(readers.rank == rank)
        order, inserted = {}, {}
        for turn in np.unique(readers.turn[here]).tolist():
            these = np.flatnonzero(readers.turn[here] == turn)
            these = these[np.argsort(readers.row[here][these])]
            order[turn] = self._send(these)
            leaf_ND = arrived_KD[order[turn]].requires_grad_(torch.is_grad_enabled())
            inserted[turn] = Inserted(self._send(readers.row[here][these]), leaf_ND)
        return EncodedStep(step, sent_MD, order, inserted, len(here), encode_s, core_s, bridge_s)

    def return_gradients(self, encoded: EncodedStep) -> None:
        """Send the gradients of all rows back, and add the encoders' gradients to their own."""
        plan, rank = encoded.step.plan, self.ranks.rank
        grads_KD = encoded.sent_MD.new_zeros(encoded.arrived, self._width)
        for turn, inserted in encoded.inserted.items():
            if inserted.rows_ND.grad is not None:
                grads_KD[encoded.order[turn]] = inserted.rows_ND.grad
        began = time.perf_counter()
        back_MD = carry_back(grads_KD, plan, rank, self.ledger)
        encoded.bridge_s += time.perf_counter() - began
        began, had = time.perf_counter(), _core_s()
        if encoded.sent_MD.requires_grad:
            encoded.sent_MD.backward(back_MD)
        encoded.encode_s += time.perf_counter() - began
        encoded.core_s += _core_s() - had

    def sum_gradients(self) -> None:
        """Sum the encoders' gradients over all ranks; every rank calls it."""
        weights = [each for each in self.encoders.parameters() if each.requires_grad]
        for each in weights:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        grads = [cast(Tensor, each.grad) for each in weights]
        flat = self.ranks.sum_(torch.cat([grad.flatten() for grad in grads]))
        parts = flat.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))

    @property
    def specs(self) -> tuple[EncoderSpec, ...]:
        """Sizes of the encoders."""
        return tuple(cast(ItemEncoder, each).spec for each in self.encoders.values())

    @property
    def _width(self) -> int:
        return int(cast(ItemEncoder, next(iter(self.encoders.values()))).width)

    def _forward(self, own: Ints) -> tuple[Tensor, Ints]:
        """Rows of items of the corpus, kind by kind, and where each item's begin."""
        like = next(self.encoders.parameters())
        starts, parts, before = np.zeros(len(own), dtype=np.int64), [], 0
        for kind, name in enumerate(KINDS):
            these = np.flatnonzero(self.items.kind[own] == kind)
            if not len(these):
                continue
            # By size, so that items of one size are one call of attention.
            these = these[np.argsort(self.items.patches[own[these]], kind="stable")]
            chosen = own[these]
            patches = np.concatenate([self.items.load(item) for item in chosen.tolist()])
            patches_PC = send(torch.from_numpy(patches), like.device).to(like.dtype)
            grids = [(rows, columns) for rows, columns in self.items.grid[chosen].tolist()]
            parts.append(self.encoders[name](patches_PC, grids))
            rows = self.items.rows[chosen]
            starts[these] = before + np.cumsum(rows) - rows
            before += int(rows.sum())
        return torch.cat(parts) if parts else like.new_zeros(0, self._width), starts

    def _send(self, places: Ints) -> Tensor:
        return send(torch.from_numpy(np.ascontiguousarray(places)), self.ranks.device)
