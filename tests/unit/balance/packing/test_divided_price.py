"""Prices of divided documents, by hand and beside what ``equipoise pack`` counts."""

import numpy as np
import pytest

from equipoise.balance.packing.divided_price import MESSAGE_TOKENS, price_ns, travel_ns_of
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import MicroBatch, PackedStep

TOKENS = LoadCurve(7.0, 10.0, (1.0,), (1e-9,), 1.0, measured=False)


def batch(*rows: tuple[int, int, int, int]) -> MicroBatch:
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return MicroBatch(table[:, :3], table[:, 3])


def test_the_reader_of_a_cut_document_pays_for_its_keys() -> None:
    head, tail = batch((3, 0, 60, 0)), batch((3, 60, 100, 0), (4, 0, 10, 0))
    packed = PackedStep("divided", ((head,), (tail,)))
    for travel_ns in (0.0, 1.0, 5.0):
        price = price_ns(packed, TOKENS, travel_ns=travel_ns, meets_each_turn=False)
        reader = 7 + 10 * 50 + travel_ns * (60 + MESSAGE_TOKENS)
        assert price == max(7 + 10 * 60, reader)


def test_a_head_and_a_tail_on_one_rank_lack_what_lies_between() -> None:
    outer, inner = batch((3, 0, 25, 0), (3, 75, 100, 0)), batch((3, 25, 75, 0))
    packed = PackedStep("divided", ((outer,), (inner,)))
    price = price_ns(packed, TOKENS, travel_ns=1.0, meets_each_turn=False)
    assert price == 7 + 10 * 50 + 50 + MESSAGE_TOKENS


@pytest.mark.parametrize("meets", [False, True])
def test_whole_documents_pay_for_no_travel(meets: bool) -> None:
    one, two, none = batch((1, 0, 9, 0)), batch((2, 5, 8, 5)), batch()
    packed = PackedStep("divided", ((one, none), (none, two)))
    price = price_ns(packed, TOKENS, travel_ns=1e9, meets_each_turn=meets)
    assert price == (2 * 7 + 90 + 30 if meets else 2 * 7 + 90)


def test_the_price_of_travel_is_a_share_of_the_linear_layers_unless_given() -> None:
    assert travel_ns_of(TOKENS, None) == 1.0
    assert travel_ns_of(TOKENS, 0.0) == 0.0
