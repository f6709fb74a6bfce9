"""Encoders sharded over a mesh of their own: all ranks, by the decoder's stage of ZeRO.

Why
    Encoders are whole for the items of every rank, whatever the decoder's layout is, so the ranks
    that may share their weights are all of them: more than share any of the decoder's.

What it decides
    ====  ==============================  ===============================  =================
    zero  parameters                      gradients                        optimizer states
    ====  ==============================  ===============================  =================
    0     whole                           summed once a step               whole
    1     gathered once a step            summed and split once a step     split
    2     gathered once a step            split layer by layer, backward   split
    3     gathered layer by layer,        split layer by layer, backward   split
          forward and backward
    ====  ==============================  ===============================  =================

    Parts are the layers of each encoder, and what is outside of them. All of that is done by
    ``parallel.zero``, as for a decoder whose ranks share the data alone; parts that it would keep
    for being small are kept here, too. Between an encoder's forward and its backward lie all
    micro-batches of the decoder, so under 3 nothing else stays gathered.

    Ranks meet wherever weights are gathered or gradients split, so each runs every encoder once in
    every step, without items if it has none.

    Frozen weights are sharded like the others, and have no gradient. A frozen encoder has no
    backward: at every stage it is freed as soon as its rows are made. If only later layers are
    trained, the backward ends at the first of them, and does not gather those before it.

Kept true (tests/multi/check/test_modality.py, tests/multi/parallel/test_modality.py)
    Loss and every gradient equal one rank's at every stage; a rank keeps its share alone; bytes are
    those of ``cost.modality.count_weight_traffic``.

Sources
    Hybrid sharding of encoders: LongCat-Flash-Omni, arXiv:2511.00279. ZeRO: arXiv:1910.02054.
"""

from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger
from equipoise.comm.mesh import join_weights
from equipoise.cost.memory.weights import SMALL_BYTES
from equipoise.nn.modality.encoder import ItemEncoder
from equipoise.parallel.zero.shard import ShardedParts
from equipoise.spec.layout import Layout


class ShardedEncoders(ShardedParts):
    """The encoders of a run on their mesh, and the switches of its collectives."""

    def __init__(
        self,
        encoders: nn.ModuleDict,
        ranks: Ranks,
        layout: Layout,
        *,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        """Shard the weights of encoders over all ranks.

        Args:
            encoders: By kind of item, with the same weights on every rank.
            ranks: All of them; each calls this.
            layout: The encoders' own (``Layout.of_encoders``).
            small_bytes: As for ``ShardedDecoder``.
        """
        self.encoders, self.layout, self._rank = encoders, layout, ranks.rank
        self.ledger = Ledger(ranks.world)
        """Bytes that this rank sent and received of weights, gradients and rows."""
        super().__init__(
            ranks,
            zero=layout.zero,
            policy=MixedPrecisionPolicy(),
            small_bytes=small_bytes,
            meter=self.ledger.meter,
            note=self._note_part,
        )
        mesh = join_weights(ranks, layout)
        for encoder in map(_own, encoders.values()):
            parts = [*encoder.layers, encoder]
            for part in parts:
                self._shard(part, mesh)
            self._switch(encoder)
            # By default a part's backward gathers the part that ran before it, which a backward
            # that ends here never reads.
            for runs_back, part in zip(encoder.spec.layers_back, parts[1:], strict=True):
                if not runs_back:
                    cast(FSDPModule, part).set_modules_to_backward_prefetch(
                        [cast(FSDPModule, part)]
                    )

    def free_frozen(self) -> None:
        """Keep only this rank's shards of encoders that are frozen: no backward follows."""
        for encoder in map(_own, self.encoders.values()):
            if encoder.spec.is_frozen:
                # It also clears the list of forwards, which otherwise a backward does.
                cast(FSDPModule, encoder).reset_iter_state()

    def _note_part(self, part: Tensor, group: dist.ProcessGroup) -> None:
        """Count a part that goes to all others of a group, as theirs come."""
        peers = [each for each in dist.get_process_group_ranks(group) if each != self._rank]
        self.ledger.sent_bytes[peers] += part.nbytes
        self.ledger.sent_messages[peers] += 1
        self.ledger.received_bytes[peers] += part.nbytes


def _own(encoder: nn.Module) -> ItemEncoder:
    return cast(ItemEncoder, encoder)
