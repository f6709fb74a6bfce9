"""Sizes of an iteration while it is put together."""

from collections.abc import Callable

from equipoise.schedule.batching.sequence import Sequence
from equipoise.schedule.batching.settings import BatchSettings, ServingPrice
from equipoise.spec.serving import IterationWork


class Totals:
    """The decodes of an iteration, and the chunks that are added to them."""

    def __init__(
        self,
        decodes: IterationWork,
        settings: BatchSettings,
        price: ServingPrice,
        has_time: Callable[[float], bool],
        *,
        is_shared: bool = False,
    ) -> None:
        """Begin with the decodes.

        Args:
            decodes: All of them.
            settings: Limits.
            price: Of iterations.
            has_time: Whether an iteration may take as many seconds with the chunks that are added.
            is_shared: Whether decodes that come back from host memory must fit it, too, all but
                the first.
        """
        self.work = decodes
        self._settings = settings
        self._price = price
        self._has_time = has_time
        self._keeps_size = not decodes.sequences
        self._is_shared = is_shared
        self._has_added = False
        self._prefill_tokens = 0

    @property
    def predicted_s(self) -> float:
        """Predicted time of the iteration so far."""
        return self._price.iteration_s(self.work)

    def add_decode(self, context_tokens: int) -> None:
        """Add one more decode, which reads this context."""
        self.work = self.work.with_decode(context_tokens)
        self._has_added = self._is_shared

    def add_chunk(self, start: int, tokens: int, logits: int) -> None:
        """Add tokens [start, start + tokens) of one sequence."""
        self.work = self.work.with_chunk(start, tokens, logits)
        self._prefill_tokens += tokens
        self._has_added = True

    def has_room(self) -> bool:
        """Whether another sequence's first page would fit the budget."""
        return not self._has_added or self._fits(0, self._settings.page_tokens, 1)

    def chunk_tokens(self, sequence: Sequence) -> int:
        """Tokens that a sequence may compute in this iteration: as many as the budget holds.

        The first chunk of an iteration has at least one page, whatever the budget; and where
        nothing decodes, half of what it would have at the start of its text: smaller chunks read
        the same keys for less. Chunks that do not end their sequence end with a page.
        """
        settings, start = self._settings, sequence.computed
        is_first = not self._prefill_tokens
        left = sequence.known - start
        whole = left if sequence.request.scores_prompt else 1
        if self._fits(start, left, whole) or (is_first and not settings.is_chunked):
            return left
        if not settings.is_chunked:
            return 0
        page, is_scored = settings.page_tokens, sequence.request.scores_prompt
        first = min(left, page - start % page)
        if not is_first and not self._fits(start, first, first if is_scored else 0):
            return 0
        if is_first and self._keeps_size:
            half = self._most(0, page, left, is_scored=is_scored) // 2
            first = min(left, first + half // page * page)
        return self._most(start, first, left, is_scored=is_scored)

    def _most(self, start: int, least: int, left: int, *, is_scored: bool) -> int:
        """The least tokens, and as many further pages of those that are left as fit."""
        page = self._settings.page_tokens
        pages, beyond = 0, -(-(left - least) // page)
        while beyond - pages > 1:
            middle = (pages + beyond) // 2
            tokens = least + middle * page
            if self._fits(start, tokens, tokens if is_scored else 0):
                pages = middle
            else:
                beyond = middle
        return least + pages * page

    def _fits(self, start: int, tokens: int, logits: int) -> bool:
        if self._prefill_tokens + tokens > self._settings.iteration_tokens:
            return False
        work = self.work.with_chunk(start, tokens, logits)
        return self._has_time(self._price.iteration_s(work))
