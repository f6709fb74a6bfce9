"""What travels: each boundary once each way, and in one order at both ends."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from equipoise.schedule.pipeline.instruction import OP, Op
from equipoise.schedule.pipeline.messages import list_messages, rank_messages
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.strategies import write_pipeline
from support.pipelines import WHOLE, steps, write_if_legal


@given(steps(), st.sampled_from(WHOLE))
def test_every_boundary_is_crossed_once_each_way(step, strategy: str) -> None:
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks)
    if schedule is None:
        return
    messages = list_messages(schedule)
    rank_of = schedule.rank_of.tolist()
    crossed = [s for s in range(schedule.stages - 1) if rank_of[s] != rank_of[s + 1]]
    wanted = Counter(
        (carries, m, *ends)
        for m in range(schedule.micro_batches)
        for s in crossed
        for carries, ends in (("activation", (s, s + 1)), ("gradient", (s + 1, s)))
    )
    assert wanted == Counter(
        (each.carries, each.micro_batch, each.from_stage, each.to_stage) for each in messages
    )
    for each in messages:
        assert (each.source, each.target) == (rank_of[each.from_stage], rank_of[each.to_stage])
        sent = schedule.orders[each.source][each.sent_at]
        needed = schedule.orders[each.target][each.needed_at]
        assert sent.tolist()[1:] == [each.from_stage, each.micro_batch]
        assert needed.tolist()[1:] == [each.to_stage, each.micro_batch]
        assert (
            (sent[OP] == Op.FORWARD) == (each.carries == "activation") == (needed[OP] == Op.FORWARD)
        )


@given(steps(), st.sampled_from(WHOLE))
def test_both_ends_agree_on_the_order_of_a_link(step, strategy: str) -> None:
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks)
    if schedule is None:
        return
    messages = list_messages(schedule)
    ends = [rank_messages(messages, rank) for rank in range(ranks)]
    assert sum(len(each.sends) for each in ends) == len(messages)
    for source in range(ranks):
        assert [m.sent_at for m in ends[source].sends] == sorted(
            m.sent_at for m in ends[source].sends
        )
        for target in range(ranks):
            sent = [m for m in ends[source].sends if m.target == target]
            received = [m for m in ends[target].receives if m.source == source]
            assert sent == received
            assert [m.number for m in sent] == list(range(len(sent)))


def test_messages_of_two_ranks() -> None:
    prices = make_prices(1, 1, 1, stages=2, micro_batches=1)
    schedule = write_pipeline("1f1b", prices, ranks=2)
    told = [
        (m.source, m.target, m.carries, m.from_stage, m.to_stage, m.sent_at, m.needed_at)
        for m in list_messages(schedule)
    ]
    assert told == [(0, 1, "activation", 0, 1, 0, 0), (1, 0, "gradient", 1, 0, 1, 1)]
    alone = write_pipeline("gpipe", prices, ranks=1)
    assert list_messages(alone) == ()
