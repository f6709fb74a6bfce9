"""The registry of systems: whole, honest, and found by name."""

from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.base.registry import find, systems
from equipoise.cli.main import VERBS

ROOT = Path(__file__).parents[3]


def test_seventy_two_systems_by_number() -> None:
    assert [each.number for each in systems()] == list(range(1, 73))
    assert len({each.name for each in systems()}) == 72
    assert {each.tier for each in systems()} == {"core", "family", "recipe", "adjacent"}
    for each in systems():
        assert each.mechanism
        assert not each.mechanism.endswith(".")
        assert each.home


def test_no_row_promises_what_it_does_not_show() -> None:
    for each in systems():
        if each.command is None:
            assert (each.test, each.result, each.missing) == (None, None, None), each.name
            assert each.state == "not yet"
        else:
            program, verb, *_ = each.command.split()
            assert program == "equipoise"
            assert verb in VERBS
            assert each.state == ("part" if each.missing else "works")
        if each.test is not None:
            assert (ROOT / each.test).is_file(), each.test


def test_found_by_number_name_or_a_part_of_it() -> None:
    assert find("34") is find("zero") is systems()[33]
    assert find("wlb").name == "WLB-LLM"
    assert find("ZeRO-Infinity").number == 48


def test_names_that_are_not_there() -> None:
    with pytest.raises(SpecError) as caught:
        find("WLM-LLB")
    assert str(caught.value) == (
        'No system is called "WLM-LLB". Nearest: WLB-LLM. "equipoise systems" lists all.'
    )
    with pytest.raises(SpecError) as caught:
        find("moe")
    assert str(caught.value) == (
        '"moe" is a part of several systems: MoE Parallel Folding, Uni-MoE, Speculative MoE, '
        "SE-MoE. Give more of the name."
    )
