"""A decoder whose sequences lie over the pools of several ranks, for the engine's loop.

What it decides
    For every iteration, what moves between ranks: keys or queries (``choice``). Which pages are
    whose is the scheduler's decision as ever: a page has a part on every rank, so that ranks admit
    and evict alike, and each has one share of ``ranks`` of the cache.

    A sequence's tokens lie where they were computed. Where they are of a number that the ranks
    divide, every rank has equally many; otherwise rank 0 remembers who has one more. In the
    invariant mode they lie by their position, and nothing is chosen (``ordered``).

Kept true (tests/multi/serve/test_longctx.py)
    Answers are those of one process, in every phase and way; a rank that is killed ends the
    requests that it had tokens of, and no other.

Sources
    Context Parallelism for Scalable Million-Token Inference, arXiv:2411.01783.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from equipoise.balance.context.variant import VARIANTS, ContinuedPrice
from equipoise.base.errors import LayoutError, ModelError
from equipoise.observe.journal import EventSink
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.batching.iteration import ServeChunk, Swap
from equipoise.schedule.batching.settings import PAGE_TOKENS, page_tokens_of
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.fused import ServedDecoder
from equipoise.serve.engine.pool import PoolSizes
from equipoise.serve.engine.request import RanksLostError
from equipoise.serve.engine.tiles import set_experts
from equipoise.serve.longctx.calibrate import measure
from equipoise.serve.longctx.choice import VariantChoice
from equipoise.serve.longctx.message import RankWork, Text, write_work
from equipoise.serve.longctx.ordered import IN_ORDER, ordered_bytes
from equipoise.serve.longctx.plan import IterationPlan
from equipoise.serve.longctx.ranks import ContextRanks


class ContextDecoder(PagedDecoder):
    """A decoder over ranks; this process is rank 0."""

    def __init__(
        self,
        decoder: ServedDecoder,
        *,
        ranks: int,
        pages: int,
        page_tokens: int = PAGE_TOKENS,
        swap_pages: int = 0,
        variants: Sequence[str] = VARIANTS,
        deadline_s: float = 60.0,
        sink: EventSink | None = None,
        is_invariant: bool = False,
    ) -> None:
        """Start the ranks, and measure what attention over them costs.

        Args:
            decoder: With its weights, on the CPU; experts without a capacity.
            ranks: Processes that share every sequence, this one included.
            pages: Pages of the cache; each rank has its share of every one.
            page_tokens: Tokens of a page, over all ranks.
            swap_pages: Slots in host memory, likewise.
            variants: What may move between ranks.
            deadline_s: Longest wait of one rank for another [s].
            sink: Where each iteration's choice, its price and its measured seconds go.
            is_invariant: Whether a row's results may depend on nothing but its own sequence: then
                they are those of one process, and nothing is chosen.

        Raises:
            LayoutError: the ranks do not divide a page, or this cannot be done over ranks.
            ModelError: the experts have a capacity, or this machine has no invariant product.
            FitError: the memory is not there.
            RanksLostError: a rank did not start.
        """
        _require_ranks(decoder, ranks, page_tokens)
        if is_invariant:
            set_experts(decoder)  # before the ranks copy it
        sizes = PoolSizes(pages, page_tokens, swap_pages, ranks)
        self.peers = ContextRanks(decoder, sizes, deadline_s=deadline_s)
        try:
            super().__init__(decoder, self.peers.pool, is_invariant=is_invariant, ranks=ranks)
            self._sink = sink
            self._shared: dict[str, tuple[int, ...]] = {}
            """Tokens of each request, by rank."""
            self._swaps: tuple[Sequence[Swap], Sequence[Swap]] = (), ()
            model, dtype = decoder.model, self.pool.dtype
            wire = Wire(model.head_width, dtype.itemsize, 8 if dtype == torch.float64 else 4)
            self._token_bytes = 2 * model.kv_heads * model.head_width * dtype.itemsize
            self.choice = VariantChoice(model, self.measure(), wire, variants)
        except BaseException:
            self.peers.close()
            raise

    def measure(self) -> ContinuedPrice:
        """What attention over the ranks costs now."""
        with self.peers.run(b"measure") as part:
            return measure(part)

    @torch.no_grad()
    def run(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> Tensor:
        """Keep the keys and values of some new tokens, and compute hidden states; see above.

        Returns:
            Hidden states before the last norm [t, D]; NaN where no logits are needed.

        Raises:
            RanksLostError: the ranks are gone, and with them all keys and values.
        """
        begin_s = time.perf_counter()
        work = self._work(chunks, tokens)
        with self.peers.run(write_work(work)) as part:
            plan = None if self.tile_rows else part.plan(work)
            x_TD = part.run(work, plan)
        assert x_TD is not None  # noqa: S101 - rank 0 gets the rows
        fields: dict[str, float] = {}
        layers = self.decoder.model.layers
        if plan is None:
            sent = ordered_bytes(work.texts, self.pool.page_tokens, self.ranks, self._token_bytes)
            sizes = {work.strategy: layers * int(sent.sum())}
        else:
            self._remember(chunks, plan)
            sizes = self._sizes(plan)
            if self._sink is not None:
                fields["predicted_s"] = layers * self._layer_s(work, plan)
                fields["measured_s"] = part.attention_s
        for strategy, size in sizes.items():
            self.moved_bytes[strategy] = self.moved_bytes.get(strategy, 0) + size
        if self._sink is not None:
            self._sink.write(
                "scalar",
                "context",
                strategy=work.strategy,
                **fields,
                iteration_s=time.perf_counter() - begin_s,
                tokens=sum(work.new),
                cached_tokens=sum(text.start for text in work.texts),
                bytes=sum(sizes.values()),
            )
        return x_TD

    def _work(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> RankWork:
        """What all ranks are to do."""
        texts = tuple(
            Text(
                each.start,
                each.tokens,
                each.logits,
                () if self.tile_rows else self._shares(each),
                each.runs,
            )
            for each in chunks
        )
        strategy, gathers = IN_ORDER, False
        if not self.tile_rows:
            gathers = self.choice.gathers
            chosen = [text for text in texts if text.tokens > 1 or not gathers] or texts
            cached, new = [text.cached for text in chosen], [text.tokens for text in chosen]
            strategy = self.choice.choose(cached, new)
        out, back = map(tuple, self._swaps)
        self._swaps = (), ()
        return RankWork(strategy, gathers, texts, tuple(tokens), out, back, self.tile_rows)

    def _sizes(self, plan: IterationPlan) -> dict[str, int]:
        """Bytes between ranks, by what moves."""
        sizes = dict[str, int]()
        for each in plan:
            sent = count_attention(each.plan.schedule, self.choice.wire).forward_bytes
            size = self.decoder.model.layers * int(sent.sum())
            sizes[each.strategy] = sizes.get(each.strategy, 0) + size
        return sizes

    def _layer_s(self, work: RankWork, plan: IterationPlan) -> float:
        """Predicted attention of one layer [s]."""
        price, layer_s = self.choice.price, 0.0
        if plan.longer is not None:
            layer_s += price.seconds(plan.longer.plan.schedule, self.choice.wire)
        if plan.single is not None:
            cached = [work.cached[at] for at in plan.single.texts.tolist()]
            layer_s += price.gathered.seconds(cached, plan.single.plan.rows)
        return layer_s

    def _remember(self, chunks: Sequence[ServeChunk], plan: IterationPlan) -> None:
        """How the tokens of each request are spread from now on."""
        for chunk, counts in zip(chunks, np.stack(plan.key_tokens, axis=1).tolist(), strict=True):
            if chunk.request:  # those of nobody are timed, and their contents do not matter
                self._shared[chunk.request] = tuple(counts)

    def swap(self, out: Sequence[Swap], back: Sequence[Swap]) -> None:
        """Move pages to and from host memory on all ranks, with the next iteration."""
        self._swaps = out, back

    def forget(self, request: str) -> None:
        """A request is gone, and with it how its tokens are spread."""
        self._shared.pop(request, None)

    @property
    def missing(self) -> RanksLostError | None:
        """Why not all ranks are there; None if they are."""
        return self.peers.missing

    def restore(self) -> None:
        """Start the ranks again if some are missing; their keys and values are gone.

        Raises:
            RanksLostError: a rank does not start.
        """
        self.peers.restore()

    def close(self) -> None:
        """End the other ranks."""
        self.peers.close()

    def _shares(self, chunk: ServeChunk) -> tuple[int, ...]:
        """Tokens before a chunk, by rank."""
        known, ranks = self._shared.get(chunk.request), self.ranks
        if known is not None and sum(known) == chunk.start:
            return known
        if chunk.start % ranks and chunk.request:
            raise ModelError(
                f"Nobody knows how {chunk.start} tokens of request {chunk.request} are spread over "
                f"{ranks} ranks."
            )
        return tuple((chunk.start + ranks - 1 - rank) // ranks for rank in range(ranks))


def _require_ranks(decoder: ServedDecoder, ranks: int, page_tokens: int) -> None:
    if ranks < 1 or page_tokens % ranks:
        raise LayoutError(
            f"Pages of {page_tokens} tokens cannot be spread evenly over {ranks} ranks. Take pages "
            f"of {page_tokens_of(max(1, ranks), page_tokens)} tokens, or other ranks."
        )
    if decoder.embed.weight.device.type != "cpu":
        raise LayoutError(
            f"Contexts are spread over ranks on CPUs alone, and the model is on "
            f"{decoder.embed.weight.device.type}. Set layout.context to 1, or serve on the CPU."
        )
