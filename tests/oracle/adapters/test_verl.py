"""verl's and SkyRL's balancing: their contracts hold, and nothing is heavier than theirs."""

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.cost.curve import break_even_curve
from equipoise.data.adapters.skyrl import BalancedPacker
from equipoise.data.adapters.verl import Balancer, install

CURVE = break_even_curve(24_576)
"""The ratio of verl's own ``24576 n + n^2``, up to half a token."""


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    """Imported where it is tested: it takes seconds."""
    return importlib.import_module("verl.utils.seqlen_balancing")


def work_of(lengths, chosen) -> list[int]:
    return [int(CURVE.document_ns(np.array(lengths)[each]).sum()) for each in chosen]


WEIGHTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=40)


@given(WEIGHTS, st.integers(1, 8), st.booleans())
def test_partitions_keep_the_contract_of_verl(verl, weights, parts, equal) -> None:
    ours = Balancer(CURVE).get_seqlen_balanced_partitions
    if len(weights) < parts or (equal and len(weights) % parts):
        with pytest.raises(LayoutError):
            ours(weights, parts, equal)
        with pytest.raises(AssertionError):
            verl.get_seqlen_balanced_partitions(weights, parts, equal)
        return
    partitions = ours(weights, k_partitions=parts, equal_size=equal)
    assert len(partitions) == parts
    assert all(part and part == sorted(part) for part in partitions)
    assert sorted(sum(partitions, [])) == list(range(len(weights)))  # noqa: RUF017
    if equal:
        assert {len(part) for part in partitions} == {len(weights) // parts}


def heaviest(weights, partitions) -> int:
    return max(int(np.array(weights)[part].sum()) for part in partitions)


def test_partitions_are_as_light_as_those_of_verl(verl) -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for parts, equal in ((8, False), (16, True), (64, False)):
        for _ in range(5):
            weights = (24576 * (n := rng.lognormal(7, 1, 512).astype(int)) + n**2).tolist()
            ours = Balancer(CURVE).get_seqlen_balanced_partitions(weights, parts, equal)
            theirs = verl.get_seqlen_balanced_partitions(weights, parts, equal)
            ratios.append(heaviest(weights, ours) / heaviest(weights, theirs))
    assert max(ratios) < 1.02
    assert np.mean(ratios) < 1.002


def tensors(lengths, nested):
    from tensordict import TensorDict

    rows = [torch.arange(n) + 1000 * at for at, n in enumerate(lengths)]
    if nested:
        ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return TensorDict({"input_ids": ids}, batch_size=[len(lengths)])
    width = max(lengths)
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return TensorDict({"input_ids": ids, "attention_mask": mask.long()}, batch_size=[len(lengths)])


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(1, 400), min_size=2, max_size=24).filter(lambda row: len(row) % 2 == 0),
    st.integers(400, 1500),
    st.sampled_from([None, 2]),
    st.sampled_from([None, 3]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
)
def test_micro_batches_keep_the_contract_of_verl(
    verl, lengths, cap, multiple, least, group, ordered, nested
) -> None:
    given_arguments = {
        "max_token_len": cap,
        "num_batches_divided_by": multiple,
        "min_num_micro_batch": least,
        "use_dynamic_bsz_balance": ordered,
        "force_group_size": group,
    }
    batch = tensors(lengths, nested)
    balancer = Balancer(CURVE)
    try:
        theirs, their_samples = verl.rearrange_micro_batches(batch, **given_arguments)
    except (AssertionError, ValueError):
        their_samples = None
    try:
        ours, samples = balancer.rearrange_micro_batches(batch, **given_arguments)
    except LayoutError:
        assert their_samples is None
        return
    assert sorted(sum(samples, [])) == list(range(len(lengths)))  # noqa: RUF017
    assert len(samples) % (multiple or 1) == 0
    assert len(samples) >= (least or 1)
    for each, part in zip(samples, ours, strict=True):
        assert sum(lengths[at] for at in each) <= cap
        assert {at // group for at in each} == {at // group for at in each[::group]}
        assert part.batch_size[0] == len(each)
        kept = part["input_ids"]
        first = [int(row[0]) for row in (kept.unbind() if kept.is_nested else kept)]
        assert first == [1000 * at for at in each]
    if their_samples is not None:
        assert len(samples) <= len(their_samples)
        assert len(theirs) == len(their_samples)
    if ordered and len(samples) > 2:
        work = work_of(lengths, samples)
        assert work.index(max(work)) not in (0, len(work) - 1) or max(work) in (work[0], work[-1])


def test_installed_functions_stand_in_place_of_verls(verl, monkeypatch) -> None:
    user = ModuleType("verl.a_worker")
    user.get_seqlen_balanced_partitions = verl.get_seqlen_balanced_partitions
    user.rearrange_micro_batches = verl.rearrange_micro_batches
    monkeypatch.setitem(sys.modules, "verl.a_worker", user)
    for name in ("get_seqlen_balanced_partitions", "rearrange_micro_batches"):
        monkeypatch.setattr(verl, name, getattr(verl, name))  # put back afterwards
    balancer = install("llama3-8b")
    assert verl.get_seqlen_balanced_partitions == balancer.get_seqlen_balanced_partitions
    assert user.rearrange_micro_batches == balancer.rearrange_micro_batches
    # verl's own callers now use them.
    _, samples = verl.rearrange_micro_batches(tensors([5, 6, 7], nested=False), max_token_len=11)
    assert sorted(map(sorted, samples)) == [[0, 1], [2]]


def test_work_is_that_of_the_model() -> None:
    work = Balancer("llama3-8b").calculate_workload(torch.tensor([1000, 2000]))
    assert 2.0 < float(work[1]) / float(work[0]) < 2.1


def packers():
    """SkyRL's packers: a file that needs nothing else of SkyRL."""
    spec = importlib.util.find_spec("skyrl")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("skyrl is not installed")
    folder = next(iter(spec.submodule_search_locations))
    file = importlib.util.spec_from_file_location(
        "skyrl_bin_packing", f"{folder}/train/dataset/bin_packing.py"
    )
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    return module


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.integers(400, 1500),
    st.sampled_from([None, 2, 4]),
    st.sampled_from([None, 3]),
)
def test_packers_keep_the_contract_of_skyrl(lengths, capacity, multiple, least) -> None:
    theirs = packers().make_seq_packer("balanced", capacity, least, multiple)
    ours = BalancedPacker(capacity, least, multiple, price=CURVE)
    try:
        wanted = theirs.pack(lengths)
    except ValueError:
        wanted = None
    try:
        bins = ours.pack(lengths)
    except LayoutError:
        assert wanted is None or len(lengths) < len(wanted) + (multiple or 1)
        return
    assert sorted(sum(bins, [])) == list(range(len(lengths)))  # noqa: RUF017
    assert all(each and sum(lengths[at] for at in each) <= capacity for each in bins)
    assert len(bins) % (multiple or 1) == 0
    if wanted is not None:
        assert len(bins) <= len(wanted)
