"""Messages between ranks of an engine arrive whole and in order, or say who is to blame."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import FaultError
from equipoise.comm.mail import Parcel
from equipoise.serve.longctx.mail import RankMail, connect


def bytes_of(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


@contextlib.contextmanager
def opened(ranks: int, deadline_s: float = 20.0) -> Iterator[list[RankMail]]:
    mails = [
        RankMail(rank, ends, deadline_s=deadline_s) for rank, ends in enumerate(connect(ranks))
    ]
    try:
        yield mails
    finally:
        for mail in mails:
            mail.close()


SIZES = st.sampled_from([0, 1, 16, 4096, 3_000_000])


@settings(max_examples=20, deadline=None)
@given(
    ranks=st.integers(2, 4),
    rounds=st.lists(st.tuples(st.integers(0, 2), SIZES, st.booleans()), min_size=1, max_size=5),
)
def test_messages_of_any_size_arrive_whole_whoever_posts_first(
    ranks: int, rounds: list[tuple[int, int, bool]]
) -> None:
    """Everyone sends to everyone; those sent late are awaited after later ones of other tags."""

    def rank(mail: RankMail) -> None:
        me = mail.rank
        others = [peer for peer in range(ranks) if peer != me]
        arrived = list[tuple[int, int, torch.Tensor]]()
        for at, (tag, size, is_late) in enumerate(rounds):
            sends = [Parcel(peer, tag, bytes_of(size, 100 * at + me), at) for peer in others]
            receives = list[Parcel]()
            for peer in others:
                into = torch.empty(size, dtype=torch.uint8)
                receives.append(Parcel(peer, tag, into, at))
                arrived.append((at, peer, into))
            if is_late and me % 2:
                mail.post(sends, [])
                mail.barrier()
                mail.post([], receives)
            else:
                mail.post(sends, receives)
                if is_late:
                    mail.barrier()
            if not is_late:
                mail.wait(at)
        for at, (_, _, is_late) in enumerate(rounds):
            if is_late:
                mail.wait(at)
        for at, peer, into in arrived:
            assert torch.equal(into, bytes_of(len(into), 100 * at + peer))
        total = sum(size for _, size, _ in rounds)
        assert mail.ledger.sent_bytes.tolist() == [total * (peer != me) for peer in range(ranks)]

    with opened(ranks) as mails, ThreadPoolExecutor(ranks) as threads:
        list(threads.map(rank, mails))


def wants(mail: RankMail, peer: int, size: int = 8) -> None:
    mail.post([], [Parcel(peer, 5, torch.empty(size, dtype=torch.uint8), 0)])
    mail.wait(0)


def test_a_rank_that_is_gone_is_named_and_others_still_answer() -> None:
    with opened(3) as mails:
        mails[2].close()
        mails[1].post([Parcel(0, 5, bytes_of(8, 1), 0)], [])
        wants(mails[0], 1)
        with pytest.raises(FaultError) as refusal:
            wants(mails[0], 2)
    assert str(refusal.value) == "rank 0 lost its connection to rank 2"


def test_a_rank_that_says_nothing_is_waited_for_until_the_deadline() -> None:
    with opened(2, deadline_s=0.05) as (one, _), pytest.raises(FaultError) as refusal:
        wants(one, 1)
    assert str(refusal.value) == "rank 0 waited 0.05 s for rank 1"


@pytest.mark.parametrize("is_early", [False, True])
def test_another_size_than_was_expected_is_refused(is_early: bool) -> None:
    with opened(2) as (one, other):
        if is_early:
            other.post([Parcel(0, 5, bytes_of(9, 0), 0), Parcel(0, 7, bytes_of(1, 0), 0)], [])
            one.post([], [Parcel(1, 7, torch.empty(1, dtype=torch.uint8), 1)])
            one.wait(1)  # by now both are here
        else:
            other.post([Parcel(0, 5, bytes_of(9, 0), 0)], [])
        with pytest.raises(FaultError) as refusal:
            wants(one, 1)
    assert str(refusal.value) == "rank 1 sent 9 bytes where 8 were expected"
