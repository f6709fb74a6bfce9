"""What an attention strategy is asked: who holds which tokens, and how many heads there are."""

from collections.abc import Callable
from dataclasses import dataclass

from equipoise.schedule.attention import AttentionSchedule, Tiles
from equipoise.schedule.attention_write import Writer, head_blocks, tiles_between
from equipoise.spec.pack import Pieces


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRequest:
    """Packed documents whose tokens already have an owner."""

    doc_tokens: Pieces
    home: tuple[Pieces, ...]
    heads: int
    kv_heads: int
    ranks_per_node: int
    """Ranks that share a node, for the strategies in two levels; divides the ranks."""

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.home)

    @property
    def all_heads(self) -> tuple[int, int]:
        """Every query head."""
        return 0, self.heads

    @property
    def all_kv_heads(self) -> tuple[int, int]:
        """Every key/value head."""
        return 0, self.kv_heads

    def tiles(self, queries: Pieces, keys: Pieces) -> Tiles:
        """Tiles between runs, in all heads."""
        return tiles_between(queries, keys, head_blocks(0, self.heads, self.heads, self.kv_heads))

    def finish(self, strategy: str, writer: Writer) -> AttentionSchedule:
        """What was written, as a schedule."""
        return writer.finish(strategy, self.home, self.doc_tokens, self.heads, self.kv_heads)


AttentionStrategy = Callable[[AttentionRequest], AttentionSchedule]
