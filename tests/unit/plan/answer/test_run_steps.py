"""A run's first steps are packed as the run will pack them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.pack import make_packer
from equipoise.base.errors import SpecError
from equipoise.cost.curve import counted_curve
from equipoise.data.stream import DocumentStream
from equipoise.plan.answer.run_steps import STEPS, RunSteps, policies_of
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import PackSpec, RunSpec

MODEL = preset("2m")
PACK = PackSpec(context_tokens=64, step_tokens=256)


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=3, max_size=40),
    dp=st.sampled_from([1, 2]),
    policy=st.sampled_from(["by-work", "by-tokens", "in-order", "delayed"]),
)
def test_each_token_of_the_step_is_in_one_micro_batch(lengths, dp, policy) -> None:
    steps = RunSteps(RunSpec(pack=PACK), MODEL, np.array(lengths, dtype=np.int64))
    documents = steps.documents(policy, Layout(dp=dp))
    assert len(documents) == dp
    if policy != "delayed":
        assert sum(sum(batch) for row in documents for batch in row) == 256
    assert steps.count_batches(policy, dp) == max(map(len, documents))
    pack = dataclasses.replace(PACK, policy=policy)
    packer = make_packer(pack, dp, counted_curve(MODEL))
    stream = DocumentStream(lengths, seed=0, context_tokens=64)
    packed = [packer.step(stream.step(step * 256, 256)) for step in range(STEPS)]
    own = [[b.doc_tokens.tolist() for b in rank if b.tokens] for rank in packed[steps.median].ranks]
    assert [row or [[1]] for row in own] == documents
    most = max(batch.tokens for step in packed for rank in step.ranks for batch in rank)
    assert steps.most_tokens(policy, Layout(dp=dp)) == most


def test_policies_that_divide_documents_have_no_price() -> None:
    with pytest.raises(SpecError) as caught:
        policies_of("gangs", is_given=True)
    assert str(caught.value) == (
        'pack.policy = "gangs" divides documents, and the parts of a step that a plan of a '
        "run.toml prices are timed with whole ones. Leave it out, or give "
        '"by-work", "by-tokens", "delayed", "fixed" or "in-order".'
    )
