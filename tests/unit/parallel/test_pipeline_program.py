"""A rank's program: messages in their links' order, on time, and no wait that can block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.parallel.pipeline.program import compile_rank
from equipoise.schedule.pipeline.messages import list_messages
from support.pipelines import WHOLE, steps, write_if_legal

drawn = given(
    steps(), st.sampled_from(WHOLE), st.sets(st.integers(0, 9)), st.sampled_from([0, 1, 4, 50])
)


def programs_of(step, strategy: str, empty: set[int], ahead: int):
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks)
    if schedule is None:
        return [], []
    messages = [m for m in list_messages(schedule) if m.micro_batch not in empty]
    found = [compile_rank(schedule, rank, frozenset(empty), ahead) for rank in range(ranks)]
    return found, messages


@drawn
@settings(max_examples=25)
def test_every_message_is_posted_once_at_each_end_in_order(step, strategy, empty, ahead) -> None:
    programs, messages = programs_of(step, strategy, empty, ahead)
    for rank, program in enumerate(programs):
        posted = [m for slot in program.slots for m in slot.receives]
        sent = [slot.send.message for slot in program.slots if slot.send]
        for peer in range(len(programs)):
            assert [m for m in posted if m.source == peer] == [
                m for m in messages if (m.source, m.target) == (peer, rank)
            ]
            assert [m for m in sent if m.target == peer] == [
                m for m in messages if (m.source, m.target) == (rank, peer)
            ]
        for place, slot in enumerate(program.slots):
            assert all(m.needed_at >= place for m in slot.receives)
            assert slot.send is None or slot.send.message.sent_at == place < slot.send.due


@drawn
@settings(max_examples=25)
def test_sends_that_wait_for_their_receive_end_nothing(step, strategy, empty, ahead) -> None:
    """Played with sends that leave only when asked for: every rank comes to its end."""
    programs, _ = programs_of(step, strategy, empty, ahead)
    at = [0] * len(programs)
    asked, given_away = set(), set()
    waits = [{} for _ in programs]

    def name(m):
        return m.source, m.target, m.number

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] <= program.end:
                place = at[rank]
                if place < program.end:
                    for m in program.slots[place].receives:
                        asked.add(name(m))
                        waits[rank].setdefault(m.needed_at, []).append((given_away, name(m)))
                if not all(key in where for where, key in waits[rank].get(place, ())):
                    break
                if place < program.end and (send := program.slots[place].send):
                    given_away.add(name(send.message))
                    waits[rank].setdefault(send.due, []).append((asked, name(send.message)))
                at[rank] += 1
                moved = True
    assert at == [program.end + 1 for program in programs]


@drawn
@settings(max_examples=20)
def test_a_send_is_let_go_when_its_receiver_must_have_it(step, strategy, empty, ahead) -> None:
    programs, messages = programs_of(step, strategy, empty, ahead)
    for rank, program in enumerate(programs):
        for slot in program.slots:
            if slot.send is None or slot.send.due == program.end:
                continue
            sent = slot.send.message
            proofs = [
                m
                for m in messages
                if (m.source, m.target, m.needed_at) == (sent.target, rank, slot.send.due)
            ]
            assert [m.sent_at >= sent.needed_at for m in proofs] == [True]
