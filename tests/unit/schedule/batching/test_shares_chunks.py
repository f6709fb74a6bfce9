"""Pages over several ranks: whoever shares them, the ranks' rows hold each token once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.context.continued import plan_continued
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.request import ServeRequest
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings
from support.serving.loop import LinearPrice, Loop

PAGE = 6


@st.composite
def loads(draw: st.DrawFn) -> list[ServeRequest]:
    """Requests, most of which begin like others."""
    requests = []
    for at in range(draw(st.integers(2, 10))):
        prompt, most = draw(st.integers(1, 50)), draw(st.integers(1, 12))
        group = draw(st.integers(0, 2))
        keys = tuple(bytes([group, page]) for page in range(prompt // PAGE)) if group else ()
        arrival_s = draw(st.sampled_from([0.0, 0.0, 0.004, 0.01]))
        requests.append(ServeRequest(f"r{at}", "a", arrival_s, prompt, most, keys))
    return requests


class SpreadLoop(Loop):
    """Writes each token where a rank would keep it."""

    def __init__(self, scheduler: Scheduler, outputs: dict[str, int], ranks: int) -> None:
        super().__init__(scheduler, outputs)
        self.ranks = ranks
        self.shares: dict[str, list[int]] = {}
        self.held: dict[tuple[int, int, int], object] = {}
        """What lies in each row of each page on each rank."""
        self.slots: dict[tuple[int, int, int], object] = {}

    def step(self) -> bool:
        if not super().step():
            return False
        schedule = self.schedules[-1]
        for swap in schedule.swaps_out:
            self.move(self.held, swap.pages, self.slots, swap.slots)
        for swap in schedule.swaps_in:
            self.move(self.slots, swap.slots, self.held, swap.pages)
        cached = []
        for chunk in schedule.chunks:
            shares = self.shares.get(chunk.request, [0] * self.ranks)
            if sum(shares) != chunk.start:
                shares = [chunk.start // self.ranks] * self.ranks
            assert sum(shares) == chunk.start
            cached.append(shares)
        new = [chunk.tokens for chunk in schedule.chunks]
        plan = plan_continued(cached, new, "ring", heads=1, kv_heads=1)
        begin = 0
        for at, chunk in enumerate(schedule.chunks):
            held = []
            for rank, rows in enumerate(plan.rows):
                mine = rows[(rows >= begin) & (rows < begin + chunk.tokens)] - begin + chunk.start
                for local, token in enumerate(mine.tolist(), cached[at][rank]):
                    self.held[self.place(chunk.pages, rank, local)] = self.name(
                        chunk.request, token
                    )
                count = int(plan.key_tokens[rank][at])
                held += [self.held[self.place(chunk.pages, rank, x)] for x in range(count)]
            wanted = [self.name(chunk.request, x) for x in range(chunk.start + chunk.tokens)]
            assert sorted(map(str, held)) == sorted(map(str, wanted))
            self.shares[chunk.request] = [int(each[at]) for each in plan.key_tokens]
            begin += chunk.tokens
        return True

    def place(self, pages: list[int], rank: int, local: int) -> tuple[int, int, int]:
        size = PAGE // self.ranks
        return rank, pages[local // size], local % size

    def move(self, source, pages, target, places) -> None:  # type: ignore[no-untyped-def]
        for page, place in zip(pages, places, strict=True):
            for rank in range(self.ranks):
                for row in range(PAGE // self.ranks):
                    target[rank, place, row] = source.get((rank, page, row))

    def name(self, request: str, token: int) -> tuple[object, int]:
        keys = self.requests[request].page_keys
        return (keys[0][0] if token < len(keys) * PAGE else request), token


@settings(deadline=None, max_examples=30)
@given(
    load=loads(),
    ranks=st.sampled_from([1, 2, 3]),
    pages=st.integers(14, 40),
    swap_pages=st.sampled_from([0, 100]),
    budget_s=st.sampled_from([1e-4, 2e-3, 4e-3, 1.0]),
    policy=st.sampled_from(["fifo", "uwfq"]),
)
def test_ranks_have_every_token_once(
    load: list[ServeRequest],
    ranks: int,
    pages: int,
    swap_pages: int,
    budget_s: float,
    policy: str,
) -> None:
    limits = BatchSettings(
        pages,
        page_tokens=PAGE,
        iteration_s=budget_s,
        prefill_iteration_s=budget_s,
        swap_pages=swap_pages,
        shares_chunks=True,
    )
    scheduler = Scheduler(limits, LinearPrice(swap=1e-7), FAIR_POLICIES[policy])
    loop = SpreadLoop(scheduler, {each.id: each.most_tokens for each in load}, ranks)
    loop.run(load)
    assert scheduler.used_pages == 0 and scheduler.available_pages == pages
    scheduler.forget_cache()
    assert scheduler.available_pages == pages and not scheduler.holders


def test_a_prompt_is_shared_up_to_where_its_chunks_ended() -> None:
    limits = BatchSettings(40, page_tokens=PAGE, shares_chunks=True, iteration_s=1.0)
    keys = tuple(bytes([page]) for page in range(8))
    loop = Loop(Scheduler(limits, LinearPrice(), FAIR_POLICIES["fifo"]), {"a": 3, "b": 3, "c": 3})
    loop.run([ServeRequest("a", "t", 0.0, 48, 3, keys)])  # its only chunk ends with a page
    loop.run([ServeRequest("b", "t", 0.0, 60, 3, keys)])
    loop.run([ServeRequest("c", "t", 0.0, 40, 3, keys[:6])])  # within that chunk
    assert [loop.served[name].hits for name in "abc"] == [0, 48, 0]
