"""What a report says of rows that travel."""

from types import SimpleNamespace

import numpy as np

from equipoise.dash.findings import _experts_finding, _worst_experts


def _run(label: str, **fields: object) -> tuple[SimpleNamespace, SimpleNamespace]:
    nothing = ("experts", "expert_choice", "parted", "rows_travel_s", "expert_file")
    plain = dict.fromkeys(nothing)
    return SimpleNamespace(**(plain | fields)), SimpleNamespace(label=label)


def _say(*runs: tuple[SimpleNamespace, SimpleNamespace]) -> str:
    records, summaries = zip(*runs, strict=True)
    return _experts_finding(records, summaries)


def test_parts_and_shortcuts_are_told_with_their_numbers() -> None:
    assert _say(_run("a")) == ""
    assert _say(_run("a", parted={1: 10, 4: 30})) == (
        "Rows travel in parts at 30 of 40 passes of rank 0 (parts: 1 in 25%, 4 in 75%)."
    )
    assert _say(_run("a", rows_travel_s=(0.0125, 0.0031)), _run("b")) == (
        "Rows of experts travel 12.5 ms of a step beside other work of rank 0 with a, which then "
        "waits 3.1 ms for them."
    )
    assert _say(_run("a", expert_file=(0.0312, 3 << 20, 1 << 20))) == (
        "Rank 0 waits for experts in its file 3.1% of a step, reading 3.0 MiB and sending 1.0 MiB "
        "of them."
    )


def test_the_least_even_step_of_experts_is_told() -> None:
    steps = np.array([1, 2]), np.array([1.25, 1.75]), np.array([1.0, 1.04])
    one = _run("a", expert_steps=steps)
    assert _worst_experts([one[0]], [one[1]]) == (
        "On the least even step the fullest rank computes 1.04× where it would have had 1.75×."
    )
    two = _run("b", expert_steps=None)
    assert _worst_experts([one[0], two[0]], [one[1], two[1]]) == (
        "On the least even step the fullest rank computes 1.04× with a where it would have had "
        "1.75×."
    )
    assert _worst_experts([two[0]], [two[1]]) == ""
