"""The request to an attention strategy: who holds which tokens, their masks, and the heads."""

from collections.abc import Callable
from dataclasses import dataclass, field

from equipoise.schedule.attention.mask import Reads, masks_of, reads_of
from equipoise.schedule.attention.runs import join_runs
from equipoise.schedule.attention.schedule import AttentionSchedule, Tiles
from equipoise.schedule.attention.tiles import runs_read, tiles_between
from equipoise.schedule.attention.write import Writer, head_blocks
from equipoise.spec.mask import Mask
from equipoise.spec.pack import Pieces


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRequest:
    """Packed documents whose tokens already have an owner."""

    doc_tokens: Pieces
    masks: tuple[Mask, ...]
    """Mask of each document."""
    home: tuple[Pieces, ...]
    heads: int
    kv_heads: int
    ranks_per_node: int
    """Ranks that share a node, for two-level strategies; divides the ranks."""
    cached: tuple[Pieces, ...] = ()
    """Pieces of which each rank has keys from earlier; none unless given."""
    reads: Reads = field(init=False)
    """Which keys queries read."""

    def __post_init__(self) -> None:
        masks = masks_of(self.masks, self.doc_tokens)
        object.__setattr__(self, "reads", reads_of(masks, self.doc_tokens))

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.home)

    def keys_of(self, rank: int) -> Pieces:
        """Runs of which a rank has keys: those of its tokens, and those that it has cached."""
        return join_runs(self.cached[rank], self.home[rank]) if self.cached else self.home[rank]

    @property
    def all_heads(self) -> tuple[int, int]:
        """Every query head."""
        return 0, self.heads

    @property
    def all_kv_heads(self) -> tuple[int, int]:
        """Every key/value head."""
        return 0, self.kv_heads

    def tiles(self, queries: Pieces, keys: Pieces, heads: tuple[int, int] | None = None) -> Tiles:
        """Tiles between runs in the given query heads; all heads unless given."""
        first, stop = self.all_heads if heads is None else heads
        blocks = head_blocks(first, stop, self.heads, self.kv_heads)
        return tiles_between(queries, keys, blocks, self.reads)

    def runs_read(self, queries: Pieces) -> Pieces:
        """Keys that some of these queries read, whoever holds them."""
        return runs_read(queries, self.reads)

    def finish(self, strategy: str, writer: Writer) -> AttentionSchedule:
        """The schedule that was written."""
        rounds = writer.finish()
        return AttentionSchedule(
            strategy,
            self.doc_tokens,
            self.masks,
            self.heads,
            self.kv_heads,
            self.home,
            rounds,
            self.cached,
        )


AttentionStrategy = Callable[[AttentionRequest], AttentionSchedule]
