"""Pages: none lost, none used twice, and reached only by the contents that they hold."""

from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.schedule.batching.free_runs import FreeRuns
from equipoise.schedule.batching.pages import PagePool
from equipoise.schedule.batching.sequence import page_runs


@settings(deadline=None, max_examples=50)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=60))
def test_free_runs_hand_out_each_page_once(steps: list[tuple[int, int]]) -> None:
    runs, pages = FreeRuns(40), 40
    held: list[int] = []
    for kind, count in steps:
        if kind == 0 and count <= runs.count:
            taken = runs.take(count, {page for page in held if page % 3 == 0})
            assert len(taken) == count and not set(taken) & set(held)
            held += taken
        elif kind == 1 and held:
            last = held[-1]
            if runs.take_next(last):
                assert last + 1 not in held
                held.append(last + 1)
            else:
                assert last + 1 in held or last + 1 == pages
        elif held:
            for page in held[:count]:
                runs.give_back(page, page + 1)
            del held[:count]
        free = sorted(page for start, stop in runs.runs().items() for page in range(start, stop))
        assert free == sorted(set(range(pages)) - set(held)) and len(free) == runs.count
        starts = runs.runs()
        assert all(stop not in starts for stop in starts.values()), "runs are maximal"


def test_a_sequence_gets_one_run_and_room_to_grow() -> None:
    pool = PagePool(64)
    first, second = pool.take(5), pool.take(5)
    assert len(page_runs(first)) == len(page_runs(second)) == 1
    for _ in range(10):
        assert pool.grow(first) and pool.grow(second)
    assert len(page_runs(first)) == len(page_runs(second)) == 1


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_pages_are_conserved_and_hold_what_they_are_reached_by(data: st.DataObject) -> None:
    pool, size = PagePool(12), 12
    contents: dict[int, tuple[str, tuple[bytes, ...]]] = {}
    held: list[tuple[str, list[int], tuple[bytes, ...]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            _, pages, _ = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.release(pages)
        else:
            tenant = data.draw(st.sampled_from("ab"))
            keys = tuple(data.draw(st.lists(st.sampled_from([b"x", b"y"]), max_size=5)))
            hits = pool.match(tenant, "", keys, len(keys))
            for at, hit in enumerate(hits):
                assert contents[hit.page] == (tenant, keys[: at + 1])
            if len(keys) - len(hits) + pool.count_idle(hits) > pool.available:
                continue
            pool.hold(hits)
            pages = [each.page for each in hits] + pool.take(len(keys) - len(hits))
            parent = hits[-1] if hits else None
            for at in range(len(hits), len(keys)):
                contents[pages[at]] = tenant, keys[: at + 1]
                parent = pool.register(tenant, "", parent, keys[at], pages[at])
                pages[at] = parent.page
            held.append((tenant, pages, keys))
        used = {page for _, pages, _ in held for page in pages}
        assert pool.used == len(used) and pool.used + pool.available == size
        for tenant, pages, keys in held:
            matched = pool.match(tenant, "", keys, len(keys))
            assert [each.page for each in matched] == pages
    for _, pages, _ in held:
        pool.release(pages)
    assert pool.used == 0
    taken = pool.take(size)  # evicts all that is idle
    assert sorted(taken) == list(range(size)) and pool.idle == 0
    assert pool.match("a", "", [b"x"], 1) == []


def test_two_requests_that_computed_the_same_page_end_up_with_one() -> None:
    pool = PagePool(4)
    mine, theirs = pool.take(1), pool.take(1)
    first = pool.register("a", "", None, b"x", mine[0])
    second = pool.register("a", "", None, b"x", theirs[0])
    assert first is second and pool.used == 1
    pool.release([second.page])
    assert pool.used == 1
    pool.release([first.page])
    assert pool.used == 0 and pool.idle == 1


def test_tenants_and_salts_never_share() -> None:
    pool = PagePool(4)
    page = pool.take(1)[0]
    pool.register("a", "s", None, b"x", page)
    assert [each.page for each in pool.match("a", "s", [b"x"], 1)] == [page]
    assert pool.match("b", "s", [b"x"], 1) == pool.match("a", "", [b"x"], 1) == []


def test_the_least_recently_used_path_is_evicted_from_its_end() -> None:
    pool = PagePool(3)
    pages = pool.take(3)
    parent = None
    for page, key in zip(pages, (b"1", b"2", b"3"), strict=True):
        parent = pool.register("a", "", parent, key, page)
    pool.release(pages)
    pool.take(1)
    assert len(pool.match("a", "", [b"1", b"2", b"3"], 3)) == 2
