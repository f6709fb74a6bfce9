"""``equipoise explain experts``: policies beside their bounds, pictures, and what is refused."""

import json
from pathlib import Path

import pytest

from equipoise.cli.main import main

ARGS = ("explain", "experts", "--ranks", "4", "--experts", "16", "--rows", "4000")


def answer(capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    assert main([*ARGS, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_policy_stands_beside_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys)
    by_name = {each["policy"]: each for each in said["policies"]}
    assert list(by_name) == ["fixed", "exact", "hecate", "eplb"]
    assert by_name["fixed"]["rows_after"] == said["rows_before"]
    assert by_name["fixed"]["copies"] == by_name["fixed"]["copy_bytes"] == 0
    assert by_name["exact"]["skew"] <= 1.02 < by_name["fixed"]["skew"]
    assert by_name["exact"]["copies"] == len(by_name["exact"]["replicas"]) > 0
    # Weights there twice, and a gradient back, of 3 x 3584 x 2560 elements in bf16.
    expert_bytes = 3 * 3 * 3584 * 2560 * 2
    for each in said["policies"]:
        assert each["copy_bytes"] == each["copies"] * expert_bytes
        assert sum(each["rows_after"]) == sum(said["loads"]) == 4 * 4000
        assert each["gap"] >= 0 and each["copies"] >= each["fewest_copies"]


@pytest.mark.parametrize("more", [("--slots", "0"), ("--policy", "tutel", "--workload", "W2")])
def test_no_policy_beats_its_bound(capsys: pytest.CaptureFixture[str], more: tuple) -> None:
    """``eplb`` and ``tutel`` copy more than slots, and have bounds of as many copies."""
    for each in answer(capsys, *more)["policies"]:
        assert each["gap"] >= 0 and each["copies"] >= each["fewest_copies"]


def test_one_rank_has_nothing_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, "--ranks", "1")
    assert said["slots"] == 0
    assert {(each["skew"], each["gap"], each["copies"]) for each in said["policies"]} == {(1, 0, 0)}


def test_the_cheapest_policy_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--slots", "12", "--least-rows", "300")
    said = answer(capsys, *more)["policies"]
    assert [each["policy"] for each in said] == ["fixed", "exact", "hecate", "eplb", "tutel"]
    cheapest = min(said, key=lambda each: each["price_rows"])
    (chosen,) = answer(capsys, *more, "--policy", "auto")["policies"]
    assert chosen["policy"] == cheapest["policy"] and chosen["digest"] == cheapest["digest"]


def test_policies_that_need_equal_places_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    names = [each["policy"] for each in answer(capsys, "--experts", "14")["policies"]]
    assert names == ["fixed", "exact", "hecate"]


def test_a_schedule_is_printed_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "experts.svg"
    assert main([*ARGS, "--policy", "exact", "--text", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("exact: 16000 rows of 16 experts over 4 ranks, ")
    assert out.endswith(f"{picture}\n") and picture.read_text().startswith("<?xml")
    assert main([*ARGS, "--policy", "exact"]) == 0
    assert "Copies" in capsys.readouterr().out
    assert main([*ARGS, "--policy", "fixed", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("fixed: max/mean ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--workload", "W9"), '"W9" is not one of W0, W1, W2, W3, W4, W5, W6, W7. Nearest: "W0".'),
        (
            ("--policy", "exakt"),
            '--policy: "exakt" is not one of all, fixed, exact, hecate, eplb, tutel, auto. '
            'Nearest: "exact".',
        ),
        (
            ("--slots", "13"),
            "--slots 13 is more than the 12 experts that a rank does not own. Give 12 or less.",
        ),
        (("--slots", "-1"), "--slots -1 is below 0. Give 0 or more."),
        (
            ("--model", "llama3-8b"),
            "--model llama3-8b has no experts. Give one that has, as mixtral-8x7b or "
            "qwen2-57b-a14b.",
        ),
        (
            ("--experts", "3"),
            "3 experts in runs of 1 leave 1 of 4 ranks without any. Set ep (layout.ep) to 3.",
        ),
        (("--ranks", "0"), "--ranks 0 is below 1. Give 1 or more."),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert main([*ARGS, *more]) == 2
    assert capsys.readouterr().err.strip() == message


def test_prefetch_is_shown_turn_by_turn(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("explain", "experts", "--memory-mib", "9000")
    assert main([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    layers, slice_bytes = 28, said["layer_bytes"]["slice"]
    assert said["least_bytes"] <= said["memory_bytes"]
    # Up all layers, down all but the two at the turn; each gather goes to seven ranks in bf16.
    assert said["pass"]["gathers"] == 2 * layers - 2
    assert said["pass"]["gathered_bytes"] == said["pass"]["gathers"] * 7 * slice_bytes // 2
    assert said["update"]["written_bytes"] == 3 * layers * slice_bytes
    assert max(said[each]["peak_bytes"] for each in ("pass", "update")) <= said["memory_bytes"]
    assert said["pass"]["demanded"] < said["pass"]["demanded_without_prefetch"]
    assert main(asked) == 0
    assert "most 8." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ("100",),
            "--memory-mib 100 does not hold two of 28 sparse layers: one takes 2.5 GiB of a rank "
            "with its moments, and 4.1 GiB gathered. Set it to 8400 or more.",
        ),
        (("0",), "--memory-mib 0 is not a finite number above 0. Give MiB of a rank."),
        (("inf",), "--memory-mib inf is not a finite number above 0. Give MiB of a rank."),
        (
            ("9000", "--slots", "2"),
            "--slots has no effect with --memory-mib. Give one or the other.",
        ),
        (
            ("9000", "--model", "llama3-8b"),
            "--model llama3-8b has no experts. Give one that has, as mixtral-8x7b or "
            "qwen2-57b-a14b.",
        ),
    ],
)
def test_memory_that_cannot_be(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...], sentence: str
) -> None:
    assert main(["explain", "experts", "--memory-mib", *more]) in (2, 3)
    assert sentence in " ".join(capsys.readouterr().err.split())
