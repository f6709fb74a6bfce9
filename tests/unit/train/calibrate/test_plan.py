"""Sizes of a calibration: every grid that prices read is whole, and a run's sizes are in it."""

import itertools

import pytest

from equipoise.spec.run.load import read_run
from equipoise.train.calibrate.plan import CalibrationPlan, documents_of, heads_of

DEVICES = CalibrationPlan.of_devices()


@pytest.mark.parametrize("plan", [CalibrationPlan(), DEVICES], ids=["cores", "devices"])
def test_every_product_has_a_time_along_its_inner_side(plan: CalibrationPlan) -> None:
    for dtype in plan.dtypes:
        sizes = [size for k in plan.widths for size in plan.products(dtype, k)]
        assert {size[1:3] for size in sizes} == set(itertools.product(plan.rows, plan.widths))
        assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_length_has_a_call_of_one_document(dtype: str) -> None:
    calls = DEVICES.attentions(dtype, 128)
    lengths = {tokens for _, tokens, *_ in calls}
    most = DEVICES.plain_tokens if dtype == "fp32" else DEVICES.pack_tokens
    assert lengths == {each for each in DEVICES.doc_tokens if dtype == "bf16" or each <= most}
    for sharing, tokens in itertools.product(DEVICES.sharings, lengths):
        units = [each[4] for each in calls if each[1] == tokens and each[3] == sharing]
        assert documents_of(units[0], sharing) == 1
        assert all(
            documents_of(each, sharing) * tokens <= most or documents_of(each, sharing) == 1
            for each in units
        )


@pytest.mark.parametrize("sharing", [1, 3, 7, 8, 48, 71])
def test_units_are_heads_times_documents(sharing: int) -> None:
    plan = CalibrationPlan(sharings=(sharing,), units=DEVICES.units, pack_tokens=1 << 30)
    for _, _, _, shared, units in plan.attentions("bf16", 64):
        assert units is not None
        heads, documents = heads_of(units, sharing), documents_of(units, sharing)
        assert (shared, heads * documents, heads % sharing) == (sharing, units, 0)


def test_the_sizes_of_a_run_are_covered_on_devices() -> None:
    run = read_run(
        None,
        [
            ("pack.context_tokens", "131072"),
            ("pack.step_tokens", "131072"),
            ("model.preset", "smollm2-135m"),
        ],
    )
    plan = CalibrationPlan.for_run(run, DEVICES)
    assert (plan.rows[-1], plan.doc_tokens[-1]) == (262_144, 131_072)
    assert plan.head_widths == (64, 128) and plan.sharings == (1, 3, 4, 8)
    assert plan.dtypes == ("fp8", "bf16", "fp32")
    longest = [call for call in plan.attentions("bf16", 64) if call[1] == 131_072]
    assert {(call[3], documents_of(call[4], call[3])) for call in longest} == {
        *((1, 1), (3, 1), (4, 1), (8, 1))
    }
