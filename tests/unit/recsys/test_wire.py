"""Rows come back from the wire within the bound of their format."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import NonFiniteError
from equipoise.recsys.wire import MOST_ERROR, decode, encode
from equipoise.schedule.tables.traffic import WIRES, wire_bytes


@given(st.integers(0, 9), st.integers(1, 17), st.sampled_from(WIRES), st.integers(0, 99))
def test_what_comes_back_is_within_the_bound(rows: int, width: int, wire: str, seed: int) -> None:
    source = np.random.default_rng(seed)
    values = torch.from_numpy(source.standard_normal((rows, width)).astype(np.float32) * 3)
    data = encode(values, wire)
    assert data.dtype == torch.uint8
    assert len(data) == rows * wire_bytes(width, wire)
    back = decode(data, width, wire)
    scale = values.abs().amax(1, keepdim=True) if wire == "int8" else values.abs()
    assert ((back - values).abs() <= MOST_ERROR[wire] * scale * 1.0001).all()
    if wire == "bf16":
        assert torch.equal(back, values.bfloat16().float())


def test_what_a_format_cannot_hold_is_refused() -> None:
    with pytest.raises(NonFiniteError) as error:
        encode(torch.tensor([[70_000.0]]), "fp16")
    assert str(error.value) == (
        "A pooled row or its gradient has 70000, which fp16 cannot carry (65,504 at most). Send "
        "bf16 or fp32."
    )
    with pytest.raises(NonFiniteError) as error:
        encode(torch.tensor([[torch.nan]]), "int8")
    assert str(error.value) == (
        "A pooled row or its gradient is not a number, which int8 cannot carry. Send fp32 to find "
        "where it comes from."
    )
    assert decode(encode(torch.zeros(2, 3), "int8"), 3, "int8").eq(0).all()
