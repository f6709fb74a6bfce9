"""On which ranks `equipoise check` proves, and what it refuses before torch is loaded."""

import pytest

from equipoise.cli.check.worlds import read_sharing
from support.verbs import run


def test_the_usual_ranks_are_those_that_can_share() -> None:
    assert read_sharing(None, (2, 4), 16) == [2, 4]
    assert read_sharing(None, (2, 4), 9) == [2]  # 3 apiece leave a fourth rank without
    assert read_sharing([5, 2, 5], (2, 4), 9) == [2, 5]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ["--ranks", 2, 4, "--model.experts", 9],
            "4 ranks cannot share 9 experts: at 3 apiece one or more would have none. Give --ranks "
            "of 2, 3, 5, 9.",
        ),
        (
            ["--ranks", 70, "--model.experts", 64],
            "70 ranks cannot share 64 experts: at 1 apiece one or more would have none. Give "
            "--ranks of 2, 3, 4, 5, 6, 7, 8, 10, and more.",
        ),
        (
            ["--ranks", 1, "--model.experts", 3],
            "1 rank shares no experts with another. Give --ranks of 2, 3.",
        ),
        (
            ["--model.experts", 1, "--model.top_k", 1],
            "No ranks can share 1 expert a layer. Set model.experts to 2 or more.",
        ),
        (["--ranks", 0], "--ranks 0 is below 1. Give 1 or more ranks."),
        (
            ["--layout", "all-legal"],
            "--experts and --layout all-legal each choose cases of their own. Give one of them.",
        ),
    ],
)
def test_a_refusal_says_which_ranks_can(
    capsys: pytest.CaptureFixture[str], flags: list[object], told: str
) -> None:
    assert run(capsys, "check", "--experts", *flags) == (2, "", f"{told}\n")
