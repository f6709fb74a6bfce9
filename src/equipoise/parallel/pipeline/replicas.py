"""The ranks that hold the same stages, and whether they meet in the same order.

What it decides
    Over which groups a step's instructions run collectives, and how often, from the part itself:
    layers whose experts are shared, and the ZeRO stage. Every rank of a pipeline compares, even
    one whose own stages never meet another: it would wait for messages of one that does.

Kept true (tests/multi/parallel/test_pipeline_experts.py)
    Replicas with different orders all raise an error before any of them waits; the collectives
    counted before a step are those of the step.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from equipoise.base.arrays import Ints
from equipoise.base.digest import digest
from equipoise.comm.mesh import Peers
from equipoise.parallel.pipeline.part import DecoderPart
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.pipeline.replicas import (
    check_meetings,
    count_exchanges,
    count_splits,
    list_meetings,
)
from equipoise.schedule.pipeline.schedule import PipelineSchedule


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """This rank and those that hold the same stages for other tokens."""

    part: DecoderPart
    peers: Peers
    """The ranks along dp x cp."""
    device: torch.device
    zero: int
    share_experts: bool

    @classmethod
    def of(cls, sharded: ShardedDecoder, part: DecoderPart) -> "Replicas | None":
        """The replicas of a part on its mesh; None if it was sharded without one."""
        mesh = sharded.mesh
        if mesh is None:
            return None
        shares = mesh.layout.ep * mesh.layout.etp > 1
        return cls(part, mesh.peers("dp", "cp"), mesh.ranks.device, sharded.zero, shares)

    def count_meetings(self) -> Ints:
        """Collectives of each operation on each stage, int64 [4, stages].

        Those over ranks that share experts, but for forwards that run again; and one where ZeRO
        has some.
        """
        counts = np.zeros((4, self.part.stages), dtype=np.int64)
        if self.share_experts:
            model = self.part.model
            layers = [self.part.layers_of(stage) for stage in range(self.part.stages)]
            sparse = [sum(model.is_sparse(at) for at in each) for each in layers]
            counts += count_exchanges(sparse)
        if self.peers.count > 1:
            counts += count_splits(self.part.stages, zero=self.zero)
        return counts

    def require_meetings(self, schedule: PipelineSchedule) -> None:
        """Refuse a schedule by which this rank and its replicas would meet in different orders.

        Raises:
            CheckError: names the first meeting that differs.
        """
        counts = self.count_meetings()
        if self.peers.count == 1 or not (self.share_experts or self.zero >= 2):
            return
        mine = list_meetings(schedule, counts)
        name = torch.tensor([int(digest([mine])[:15], 16)], device=self.device)
        names = name.new_empty(self.peers.count)
        dist.all_gather_single(names, name, group=self.peers.group)
        if bool((names != name).any()):
            every: list[Ints] = [mine] * self.peers.count
            dist.all_gather_object(every, mine, group=self.peers.group)
            check_meetings(every)
