"""What a schedule of experts costs, in rows that its slowest rank could compute meanwhile.

Why
    A schedule trades rows of the fullest rank for weights that travel. Which is cheaper depends on
    how fast ranks compute and how fast links are, by one number: ``least_rows``, the rows whose
    products take as long as a copy's bytes.

What it decides
    The price of a schedule is the sum of three, each of the rank with the most: rows that it
    computes; rows that leave or arrive, ``row_cost`` each; copies that leave or arrive,
    ``least_rows`` each. A row crosses a link four times, there and back in forward and backward,
    with ``h b`` bytes; a row computes ``18 h f`` FLOP. With F FLOP/s, B bytes/s, and
    ``least_rows = F (2 b + g) / (6 B)``, its cost is ``least_rows 4 b / (3 f (2 b + g))`` rows:
    ``4 least_rows / (9 f)`` where gradients are as wide as weights.

Kept true (tests/unit/balance/expert/test_tutel.py)
    With free links the price is the rows of the fullest rank.

Sources
    Derived from ``balance.expert.bound.break_even_rows``.
"""

from dataclasses import dataclass

from equipoise.schedule.expert.schedule import ExpertSchedule


@dataclass(frozen=True, slots=True)
class RowPrices:
    """Prices of what travels, in rows of an expert's products, forward and backward."""

    least_rows: float = 1.0
    """What a whole expert costs: its weights there, twice, and its gradient back."""
    row_cost: float = 0.0
    """What a row costs: there and back, twice."""

    @classmethod
    def of_width(cls, least_rows: int, expert_ffn: int) -> "RowPrices":
        """Prices by the rows that a copy is worth and the hidden units of an expert.

        >>> round(RowPrices.of_width(172, 88).row_cost, 2)
        0.87
        """
        return cls(least_rows, 4 * least_rows / (9 * expert_ffn))


def price_experts(schedule: ExpertSchedule, prices: RowPrices) -> float:
    """Rows that the slowest rank could compute in the time that a schedule takes."""
    sent, copied = schedule.sent, schedule.copied
    local = sent.diagonal()
    travels = max(int((sent.sum(axis=each) - local).max()) for each in (0, 1))
    weights = max(int(copied.sum(axis=each).max()) for each in (0, 1))
    computed = int(schedule.computed.max())
    return computed + prices.row_cost * travels + prices.least_rows * weights
