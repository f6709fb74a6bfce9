"""Strategies as words: said and read back, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.sim.mixed.layers import LayerStrategy
from equipoise.sim.mixed.words import read_layers, say_layers
from equipoise.spec.layout import Layout

DEGREES = st.sampled_from([(1, 1, 8), (2, 1, 4), (2, 2, 2), (1, 4, 2), (8, 1, 1)])


@given(
    st.lists(
        st.tuples(
            DEGREES,
            st.sampled_from([0, 1, 2, 3]),
            st.sampled_from(["none", "attention", "selective", "full"]),
            st.sampled_from(["needed-kv", "ring"]),
        ),
        min_size=1,
    ),
    st.sampled_from([1, 4]),
)
def test_what_is_said_is_read_back(picked, pp: int) -> None:
    base = Layout(dp=8, pp=pp, order=("pp", "dp", "cp", "tp"))
    layers = tuple(
        LayerStrategy(
            Layout(tp=tp, cp=cp, dp=dp, pp=pp, zero=zero, order=base.order),
            how,
            travels if cp > 1 else "needed-kv",
        )
        for (tp, cp, dp), zero, how, travels in picked
    )
    assert read_layers(say_layers(layers), base) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tp=2,dp=4:full",
            'layers: "tp=2,dp=4:full" is not a run of layers. Give how many, their degrees and '
            "what they make again, as 12:tp=2,dp=4,zero=1:full.",
        ),
        (
            "0:dp=8:full",
            'layers: "0:dp=8:full" is not a run of layers. Give how many, their degrees and '
            "what they make again, as 12:tp=2,dp=4,zero=1:full.",
        ),
        (
            "2:dp=8:every-2",
            'layers: no such recompute: "every-2". Nearest: selective. Known: none, '
            "attention, selective, full.",
        ),
        (
            "2:cp=8:none:rings",
            'layers: no such context strategy: "rings". Nearest: ring. Known: needed-kv, '
            "all-gather, ring, ulysses.",
        ),
        (
            "2:pp=8:none",
            'layers: "pp=8" begins with no known name. Nearest: tp. Give tp, cp, dp, zero, '
            "replicas as name=number, with commas between.",
        ),
        ("2:dp=8,zero=4:none", "layers: zero is 4. Give 0, 1, 2 or 3."),
    ],
)
def test_runs_that_are_none(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_layers(text, Layout(dp=8))
    assert str(caught.value) == message
