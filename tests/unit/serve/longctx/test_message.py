"""What rank 0 says is what the others read."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.schedule.batching.iteration import PageRun, Swap
from equipoise.serve.longctx.message import RankWork, Text, read_work, write_work

counts = st.integers(0, 1 << 40)
many = st.lists(counts, max_size=4).map(tuple)
runs = st.lists(st.builds(PageRun, counts, counts), max_size=3).map(tuple)
texts = st.lists(st.builds(Text, counts, counts, counts, many, runs), max_size=3).map(tuple)
swaps = st.lists(st.builds(Swap, st.text(), many, many), max_size=2).map(tuple)


names = st.sampled_from(["ring", "pass-q"])


@given(st.builds(RankWork, names, st.booleans(), texts, many, swaps, swaps))
def test_a_message_is_read_as_it_was_written(work: RankWork) -> None:
    assert read_work(write_work(work)) == work
