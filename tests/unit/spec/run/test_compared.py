"""Which policies a run can compare."""

import dataclasses
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.catalog import POLICIES
from equipoise.spec.run.compared import compared_specs, require_same_sides
from equipoise.spec.run.load import read_run
from equipoise.spec.run.resolved import ResolvedFile, write_resolved

RUN = read_run(None, [("pack.cut", "windows")])


def refused(policies: list[str], spec=RUN.spec) -> str:
    with pytest.raises(SpecError) as caught:
        compared_specs(spec, policies)
    return str(caught.value)


def test_each_policy_has_the_runs_spec() -> None:
    specs = compared_specs(RUN.spec, ["in-order", "divided", "by-work"])
    assert [spec.pack.policy for spec in specs] == ["in-order", "divided", "by-work"]
    for spec in specs:
        same = dataclasses.replace(spec.pack, policy=RUN.spec.pack.policy)
        assert dataclasses.replace(spec, pack=same) == RUN.spec


def test_what_cannot_be_compared_is_refused() -> None:
    assert refused(["in-order", "divide"]) == (
        '"divide" is not a packing policy to compare. Nearest: "divided".'
    )
    assert refused(["divided", "divided"]) == (
        '"divided" is to be compared with itself. Name each policy once.'
    )
    assert refused(["divided"]) == (
        "A comparison needs at least two packing policies, such as in-order,divided; 1 given."
    )
    assert refused(["in-order", "delayed"]) == (
        '"delayed" cannot be compared step by step: it lets documents wait for later steps, so '
        "its steps train other documents than those of other policies."
    )
    assert refused(["in-order", "fixed"]) == (
        '"fixed" cannot be compared step by step: it cuts documents to fill its windows, so it '
        "trains other pieces than other policies."
    )
    assert refused(["in-order", "by-work"], read_run(None, []).spec) == (
        'A comparison needs pack.cut = "windows", so that all policies train the same pieces; it '
        'is "documents". Set it in run.toml, or pass --pack.cut windows.'
    )
    layout = dataclasses.replace(RUN.spec.layout, schedule="skip-partial")
    assert refused(["in-order", "by-work"], dataclasses.replace(RUN.spec, layout=layout)) == (
        'layout.schedule = "skip-partial" leaves stages out, so packs of the same pieces have '
        "different gradients. Compare policies under another schedule."
    )


def test_every_other_policy_is_accepted() -> None:
    waits = {"delayed", "fixed", "fixed-exact"}
    policies = [policy for policy in POLICIES if policy not in waits]
    assert len(compared_specs(RUN.spec, policies)) == len(POLICIES) - 3


def test_a_folder_keeps_its_sides(tmp_path: Path) -> None:
    require_same_sides(tmp_path, ["in-order", "divided"])  # no run yet
    made = ResolvedFile(RUN.spec, RUN.model, {}, 2, "corpus", "", compare=("in-order", "divided"))
    write_resolved(tmp_path, made)
    require_same_sides(tmp_path, ["divided", "in-order"])
    for other in ([], ["in-order", "by-work"]):
        with pytest.raises(SpecError) as caught:
            require_same_sides(tmp_path, other)
        assert str(caught.value) == (
            f"{tmp_path} holds a run that compares in-order and divided. Go on with --compare "
            f"in-order,divided, or choose another folder with --out."
        )
    write_resolved(tmp_path, dataclasses.replace(made, compare=()))
    require_same_sides(tmp_path, [])
    with pytest.raises(SpecError) as caught:
        require_same_sides(tmp_path, ["in-order", "divided"])
    assert str(caught.value) == (
        f"{tmp_path} holds a run that compares no policies. Choose another folder with --out."
    )
