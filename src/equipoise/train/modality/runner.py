"""Items of a step around the decoder's micro-batches: encoded before, their gradients after.

What it decides
    Nothing: ``parallel.modality`` deals, moves and computes; this says who embeds which token,
    keeps what is between the two phases, and measures both.

Kept true (tests/multi/checkpoint/test_modality.py, tests/multi/check/test_modality.py)
    Trained weights equal those of one rank, whatever the layout.
"""

from dataclasses import dataclass, replace

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.comm.group import Ranks
from equipoise.cost.modality import count_weight_traffic, held_bytes
from equipoise.data.cache.store import TokenStore
from equipoise.nn.modality.insert import Inserted
from equipoise.observe.journal import EventSink
from equipoise.parallel.modality.api import EncodedStep, Modality
from equipoise.parallel.modality.shard import ShardedEncoders
from equipoise.spec.modality.encoder import KINDS
from equipoise.spec.pack import PackedStep
from equipoise.train.context import ContextGroup


@dataclass(frozen=True, slots=True)
class EncoderLoads:
    """What encoders did in a step, on all ranks."""

    items: int
    patches: int
    """Patches of all items."""
    rows: int
    """Rows that the decoder read."""
    work: list[int]
    """Multiplications of each rank."""
    work_in_turn: list[int]
    """The same if items were dealt in turn."""
    gap: float
    """How far the fullest rank is above the least possible, relative."""
    bytes: int
    """Sent over the bridge by all ranks, both ways."""
    messages: int
    """The messages that these were in."""
    weight_bytes: int
    """Encoders' weights that all ranks sent to be gathered, and gradients to be split."""
    weight_messages: int
    """The messages that these were in."""
    encode_s: list[float]
    """Seconds of each rank's encoders, forward and backward."""
    encode_core_s: list[float]
    """Those of them in which the rank had its core."""
    bridge_s: list[float]
    """Seconds of each rank in the bridge and in gathering weights, waits included."""
    held_bytes: int
    """What this rank held of encoders and items, counted [bytes]."""


@dataclass(slots=True, eq=False)
class ModalityRunner:
    """The encoders of a run on one rank, and the step that they are in."""

    modality: Modality
    sharing: ContextGroup
    journal: EventSink
    encoded: EncodedStep | None = None

    @classmethod
    def of(
        cls,
        encoders: ShardedEncoders,
        store: TokenStore,
        ranks: Ranks,
        sharing: ContextGroup,
        journal: EventSink,
    ) -> "ModalityRunner":
        """Beside a decoder whose ranks share as ``sharing`` says."""
        modality = Modality(encoders, store.require_items(), store.documents, ranks)
        return cls(modality, sharing, journal)

    def begin(self, packed: PackedStep, step: int, store: TokenStore) -> None:
        """Encode the items of a step; every rank calls it.

        Args:
            packed: The step, equal on all ranks.
            step: Its number.
            store: The corpus that it is of.

        Raises:
            LayoutError: ranks dealt otherwise.
            DataError: a file of an item cannot be read, or has changed.
        """
        of_store = replace(self.modality, items=store.require_items(), documents=store.documents)
        with self.journal.span("encode", step=step):
            planned = of_store.plan(
                packed, step, lambda data_rank, turn: self.sharing.places(packed, data_rank, turn)
            )
            self.encoded = of_store.encode(planned)

    def of_turn(self, turn: int) -> Inserted | None:
        """Rows of one of this rank's micro-batches."""
        return None if self.encoded is None else self.encoded.of_turn(turn)

    def finish(self, step: int) -> EncoderLoads:
        """Send gradients back and compute the encoders' own; every rank calls it."""
        encoded = self.encoded
        assert encoded is not None  # noqa: S101 - begin comes before
        with self.journal.span("encode-backward", step=step):
            self.modality.return_gradients(encoded)
        self.encoded = None
        took = self.modality.ranks.gather_floats(encoded.took_s.tolist())
        return _loads(self.modality, encoded, took.numpy())


def _loads(modality: Modality, encoded: EncodedStep, took_s: Floats) -> EncoderLoads:
    planned, items, rank = encoded.step, modality.items, modality.ranks.rank
    own = planned.own(rank)
    kind, patches = items.kind[own], items.patches[own]
    shares = [(each, patches[kind == KINDS.index(each.kind)]) for each in modality.specs]
    width, sharded = encoded.sent_MD.shape[1], modality.sharded
    sent = planned.bytes(width, element_bytes=modality.element_bytes)
    weights = count_weight_traffic(
        modality.specs,
        width,
        sharded.layout,
        element_bytes=modality.element_bytes,
        small_bytes=sharded.small_bytes,
    )
    return EncoderLoads(
        items=len(planned.items),
        patches=int(items.patches[planned.items].sum()),
        rows=int(planned.plan.sent.sum()),
        work=planned.dealt.work.tolist(),
        work_in_turn=planned.dealt.work_in_turn.tolist(),
        gap=planned.dealt.gap,
        bytes=int(np.sum(sent)),
        messages=planned.messages,
        weight_bytes=weights.sent_bytes,
        weight_messages=weights.messages,
        encode_s=took_s[:, 0].tolist(),
        encode_core_s=took_s[:, 1].tolist(),
        bridge_s=took_s[:, 2].tolist(),
        held_bytes=held_bytes(
            shares,
            width,
            sharded.layout,
            sent_rows=len(encoded.sent_MD),
            read_rows=encoded.arrived,
        ),
    )
