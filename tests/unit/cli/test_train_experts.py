"""Layouts of experts that a model does not carry are refused before a corpus is read."""

import dataclasses
import json
from pathlib import Path

import pytest

from equipoise.base.errors import FitError, LayoutError, SpecError
from equipoise.base.units import GIB, format_bytes
from equipoise.cli.main import main
from equipoise.launch.doctor.gather import read_machine
from equipoise.launch.doctor.needs import copy_bytes, needs_of, require_slots
from equipoise.launch.forms import Nodes
from equipoise.spec.run.load import read_run
from equipoise.spec.run.obey import share_experts
from equipoise.spec.run.spec import ExpertsSpec
from equipoise.train.request import prepare


def test_ranks_that_would_share_no_experts(tmp_path: Path) -> None:
    dense = read_run(None, [("layout.dp", "2"), ("layout.ep", "2")])
    missing = dataclasses.replace(dense.spec.data, source="text", path="missing")
    run = dataclasses.replace(dense, spec=dataclasses.replace(dense.spec, data=missing))
    with pytest.raises(LayoutError) as caught:
        prepare(run, out=tmp_path)
    assert str(caught.value) == (
        "The model has no experts that 2 ranks could share. Set ep (layout.ep) = 1 and "
        "etp (layout.etp) = 1, or give the model experts."
    )


SPLIT = (
    'experts.policy = "{}" copies whole experts, but etp = 2 ranks share the hidden units of each. '
    'Set layout.etp = 1, or experts.policy to "fixed" or "tutel".'
)
UNEVEN = (
    "eplb gives every rank equally many places, but 2 ranks do not divide 7 experts. Give a number "
    'of ranks that does, or another policy, as "exact".'
)
SHUFFLED = (
    'experts.policy = "speculative" shuffles tokens among the tensor-parallel ranks that share the '
    "experts, which needs tp = ep of 2 or more and etp = 1; the layout has tp = {}, ep = {}, "
    'etp = 1. Set layout.tp and layout.ep to the same number, or experts.policy = "fixed".'
)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        *(
            ({"experts.policy": policy, "layout.etp": "2"}, SPLIT.format(policy))
            for policy in ("exact", "hecate", "eplb", "auto")
        ),
        ({"experts.policy": "exact", "layout.etp": "2", "layout.ep": "2"}, SPLIT.format("exact")),
        ({"experts.policy": "eplb", "layout.ep": "2", "model.experts": "7"}, UNEVEN),
        ({"experts.policy": "speculative", "layout.dp": "2"}, SHUFFLED.format(1, 1)),
        (
            {"experts.policy": "speculative", "layout.tp": "2", "layout.ep": "4"},
            SHUFFLED.format(2, 4),
        ),
        (
            {"experts.policy": "speculative", "layout.tp": "2", "layout.pp": "2"},
            'experts.policy = "speculative" is not proven in a pipeline, and the layout has '
            'pp = 2. Set layout.pp = 1, or experts.policy = "fixed".',
        ),
    ],
)
def test_policies_that_ranks_cannot_obey(
    tmp_path: Path, keys: dict[str, str], sentence: str
) -> None:
    run = read_run(None, [("model.experts", "8"), ("layout.dp", "4"), *keys.items()])
    missing = dataclasses.replace(run.spec.data, source="text", path="missing")
    run = dataclasses.replace(run, spec=dataclasses.replace(run.spec, data=missing))
    with pytest.raises(LayoutError) as caught:
        prepare(run, out=tmp_path)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {},
            '--experts.policy: "exact" balances experts, but the model has none. Set '
            'model.experts, or experts.policy = "fixed".',
        ),
        (
            {"model.engine": "transformers", "model.init": "hf:nowhere"},
            '--experts.policy: "exact" lets ranks compute each other\'s experts, but model.engine '
            '= "transformers" (--model.engine) computes the model with transformers\' own modules, '
            'which keep all experts on each rank. Set experts.policy = "fixed".',
        ),
    ],
)
def test_policies_of_models_whose_experts_cannot_move(keys: dict[str, str], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_run(None, [("experts.policy", "exact"), *keys.items()])
    assert sentence in str(caught.value).splitlines()


def test_a_table_that_nobody_reads() -> None:
    with pytest.raises(SpecError) as caught:
        read_run(None, [("model.experts", "8"), ("experts.routes", "routes.npz")])
    assert str(caught.value).splitlines()[-1] == (
        '--experts.routes: "routes.npz" is given, but experts.policy = "fixed" (default) reads no '
        'table. Set experts.policy = "speculative", or leave it out.'
    )


@pytest.mark.parametrize(
    ("keys", "sentences"),
    [
        (
            {},
            "--experts.memory_mib: 64.0 is memory for experts, but the model has none. Set "
            "model.experts, or experts.memory_mib = 0.",
        ),
        (
            {"model.experts": "8"},
            "--experts.memory_mib: 64.0 puts experts in a file, which is not proven with "
            "layout.zero = 1 (default). Set layout.zero = 3, or experts.memory_mib = 0.",
        ),
        (
            {"model.experts": "8", "layout.zero": "3", "experts.policy": "exact"},
            "--experts.memory_mib: 64.0 puts experts in a file, which is not proven with "
            'experts.policy = "exact" (--experts.policy). Set experts.policy = "fixed", or '
            "experts.memory_mib = 0.",
        ),
        (
            {"model.engine": "transformers", "model.init": "hf:nowhere"},
            "--experts.memory_mib: 64.0 lets experts lie in a file, but model.engine = "
            '"transformers" (--model.engine) computes the model with transformers\' own modules, '
            "which keep all experts on each rank. Set experts.memory_mib = 0.",
        ),
    ],
)
def test_files_of_experts_that_are_not_proven(keys: dict[str, str], sentences: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_run(None, [("experts.memory_mib", "64"), *keys.items()])
    assert sentences in str(caught.value).splitlines()


def test_a_file_leaves_memory_to_the_rest() -> None:
    keys = {"model.experts": "8", "layout.zero": "3", "layout.dp": "2"}
    plain = read_run(None, list(keys.items()))
    filed = read_run(None, [*keys.items(), ("experts.memory_mib", "1")])
    nodes = Nodes(1, 2, "none")
    needs = [needs_of(each.spec, each.model, 2, nodes) for each in (plain, filed)]
    every = 12 * filed.model.sparse_layers * 4 * filed.model.expert_params
    saved = every - (1 << 20)
    assert needs[1].terms["experts in a file"] == -saved < 0
    assert needs[0].rank_bytes - needs[1].rank_bytes == saved


def test_slots_that_memory_does_not_hold() -> None:
    given = {"model.experts": "16", "experts.policy": "exact", "experts.slots": "6"}
    run = share_experts(read_run(None, [*given.items(), ("layout.dp", "2")]), 2)
    assert run.spec.layout.ep == 2
    needs = needs_of(run.spec, run.model, 2, Nodes(1, 2, "none"))
    one = copy_bytes(run.spec, run.model, 1)
    assert one == 4 * 4 * run.model.expert_params and needs.terms["copies"] == 6 * one
    all_bytes = 2 * needs.rank_bytes
    fits = dataclasses.replace(read_machine(), memory_bytes=all_bytes)
    require_slots(fits, needs, run.spec, run.model)
    less = dataclasses.replace(fits, memory_bytes=all_bytes - 5 * one)
    with pytest.raises(FitError) as caught:
        require_slots(less, needs, run.spec, run.model)
    assert str(caught.value) == (
        f"experts.slots = 6 needs {format_bytes(6 * one)} for copies on each of 2 ranks, "
        f"{format_bytes(5 * one)} more than is free here; 3 slots fit. Set experts.slots = 3."
    )
    # Where all slots together are not what is too much, other words are said.
    tiny = dataclasses.replace(fits, memory_bytes=all_bytes - 13 * one)
    require_slots(tiny, needs, run.spec, run.model)
    # A rank holds no more copies than there are experts of others; eplb moves its own, too.
    assert copy_bytes(run.spec, run.model, 4096) == 8 * one
    moved = dataclasses.replace(run.spec, experts=ExpertsSpec("eplb", slots=1))
    assert copy_bytes(moved, run.model, 1) == 8 * one
    moved = dataclasses.replace(moved, layout=dataclasses.replace(moved.layout, ep=4))
    assert copy_bytes(moved, run.model, 1) == (4 + 1) * one


@pytest.mark.parametrize(
    ("policy", "ranks", "ep"),
    [("exact", 4, 4), ("eplb", 6, 2), ("fixed", 4, 1), ("hecate", 12, 6), ("exact", 1, 1)],
)
def test_as_many_ranks_share_experts_as_can(policy: str, ranks: int, ep: int) -> None:
    flags = [("model.experts", "6" if ranks == 12 else "8"), ("experts.policy", policy)]
    run = share_experts(read_run(None, flags), ranks)
    assert run.spec.layout.ep == ep
    given = share_experts(read_run(None, [*flags, ("layout.ep", "2")]), ranks)
    assert given.spec.layout.ep == 2


def test_a_policy_for_which_no_ranks_can_share_the_experts_is_refused() -> None:
    begin = 'experts.policy = "{}" balances experts between ranks, and no number of the {} ranks '
    for policy, experts, ranks, said in (
        ("eplb", 8, 3, "can share 8 experts, each as many, which eplb needs."),
        ("eplb", 7, 2, "can share 7 experts, each as many, which eplb needs."),
        ("exact", 1, 2, "can share 1 expert."),
        ("auto", 2, 5, "can share 2 experts."),
    ):
        flags = [("model.experts", str(experts)), ("experts.policy", policy)]
        with pytest.raises(LayoutError) as caught:
            share_experts(read_run(None, flags), ranks)
        fix = f' Set model.experts to a multiple of {ranks}, or experts.policy = "fixed".'
        assert str(caught.value) == begin.format(policy, ranks) + said + fix


def test_parts_are_judged_with_the_ranks_that_will_share_the_experts() -> None:
    flags = [("model.experts", "8"), ("experts.policy", "exact"), ("layout.parts", "4")]
    assert share_experts(read_run(None, flags), 2).spec.layout.ep == 2
    with pytest.raises(LayoutError) as caught:
        share_experts(read_run(None, flags), 1)
    assert str(caught.value) == (
        "layout.parts = 4 cuts rows of blocks with layout.tp > 1, and of experts with "
        'layout.ep > 1 and layout.etp = 1 or experts.policy = "tutel"; here are none (tp = 1, '
        'ep = 1, etp = 1, policy = "exact"). Set layout.parts = 1.'
    )


def test_a_run_is_examined_with_the_ranks_that_will_share_its_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    needed = []
    for slots in ("0", "4"):
        sizes = "--model.hidden 1024 --model.heads 8 --model.ffn 18432 --model.layers 1"
        flags = ["--model.experts", "8", "--layout.dp", "2", "--experts.policy", "exact"]
        main(["doctor", *sizes.split(), *flags, "--experts.slots", slots, "--json"])
        rows = {each["what"]: each for each in json.loads(capsys.readouterr().out)["rows"]}
        needed.append(float(rows["memory"]["found"].split(", ")[1].split()[0]))
    assert needed[1] - needed[0] == pytest.approx(2 * 4 * 4 * 4 * 3 * 1024 * 9216 / GIB, abs=0.1)


def test_a_model_that_cannot_be_read_is_not_said_to_have_no_experts() -> None:
    with pytest.raises(SpecError) as caught:
        read_run(None, [("experts.policy", "exact"), ("model.init", "hf:nowhere")])
    assert str(caught.value).startswith("--model.init: cannot read nowhere/config.json")
    assert "experts.policy" not in str(caught.value)
