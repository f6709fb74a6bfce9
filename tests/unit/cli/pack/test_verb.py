"""``equipoise pack``: the table, the JSON, the packs, the picture, and what it refuses."""

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

from equipoise.base.units import format_bytes
from equipoise.cli.main import main

KEYS = [
    "policy",
    "skew",
    "p95_skew",
    "turn_skew",
    "gap",
    "max_tokens_ratio",
    "delay_mean",
    "delay_max",
    "plan_s",
    "documents",
    "fragments",
    "travel_bytes",
    "step_s",
    "whole_step_s",
]
SMALL = (
    "--lengths",
    "wikipedia",
    "--context-tokens",
    "8192",
    "--micro-batches",
    "4",
    "--steps",
    "6",
)


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict]:
    assert main(["pack", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["pack", *argv]) == 2
    return capsys.readouterr().err


def test_json_has_exactly_these_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, *SMALL)
    assert [row["policy"] for row in found] == [
        "in-order",
        "fixed",
        "by-tokens",
        "by-work",
        "delayed",
        "divided",
        "divided-in-time",
        "gangs",
        "bytescale",
    ]
    assert all(list(row) == KEYS for row in found)
    assert len({row["documents"] for row in found}) == 1


def test_the_slow_policy_runs_when_named(capsys: pytest.CaptureFixture[str]) -> None:
    [row] = rows(capsys, *SMALL[:-1], "1", "--policy", "fixed-exact")
    assert row["policy"] == "fixed-exact"


@pytest.mark.parametrize("ranks", [1, 3])
def test_anyone_can_recompute_the_skew_from_the_packs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    out = tmp_path / "packs.jsonl"
    argv = (*SMALL, "--cost", "tokens+pairs:4000", "--out", str(out), "--ranks", str(ranks))
    scores = {row["policy"]: row for row in rows(capsys, *argv)}
    loads: dict[str, dict[int, dict[tuple[int, int], float]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(float))
    )
    covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for text in out.read_text().splitlines():
        line = json.loads(text)
        froms = {tuple(p): f for p, f in zip(line["pieces"], line["attends_from"], strict=True)}
        for document, start, stop in line["pieces"]:
            covered[line["policy"]] += [(document, at) for at in range(start, stop)]
        if line.get("flush"):
            continue
        for rank, share in enumerate(line.get("ranks", [line["pieces"]])):
            load = 0.0
            for document, start, stop in share:
                begin = froms[document, start, stop]
                pairs = sum(
                    (n - begin) * (n - begin + 1) // 2 * s for n, s in ((stop, 1), (start, -1))
                )
                load += (stop - start) + 2 * pairs / 4000
            loads[line["policy"]][line["step"]][line["bin"], rank] += load
    for policy, steps in loads.items():
        skews = [max(s.values()) * len(s) / sum(s.values()) for s in steps.values()]
        assert sum(skews) / len(skews) == pytest.approx(scores[policy]["skew"], rel=1e-6)
        assert len(covered[policy]) == 6 * 4 * 8192
    tokens = {policy: sorted(found) for policy, found in covered.items()}
    assert all(found == tokens["in-order"] for found in tokens.values())


def test_the_table_names_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "6 steps of 32,768 tokens over 4 bins, windows of 8,192." in " ".join(out.split())
    for row in ("in-order", "divided-in-time", "delay", "travels", "skew: heaviest over mean"):
        assert row in out
    assert "…" not in out  # nothing is cut off


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "packs.png"
    assert main(["pack", *SMALL, "--plot", str(file), "--model", "llama3-8b"]) == 0
    assert capsys.readouterr().out.endswith(f"{file}\n")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_more_context_ranks_travel_more(capsys: pytest.CaptureFixture[str]) -> None:
    one, four = (rows(capsys, *SMALL, "--ranks", ranks, "--policy", "by-work")[0] for ranks in "14")
    assert one["travel_bytes"] == 0
    assert four["travel_bytes"] > 0


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--policy", "by-wrok") == (
        '--policy: "by-wrok" is not one of all, in-order, fixed, fixed-exact, by-tokens, by-work, '
        'delayed, divided, divided-in-time, gangs, flexsp, bytescale. Nearest: "by-work".\n'
    )
    assert refused(capsys, "--micro-batches", "0") == (
        "--micro-batches 0 is below 1. Give 1 or more.\n"
    )
    assert refused(capsys, "--ranks", "-1") == "--ranks -1 is below 1. Give 1 or more.\n"
    assert refused(capsys, "--cost", "tokens+pairs:long") == (
        '--cost: "tokens+pairs:long" is neither "flop" nor "tokens+pairs:S" with a length S in '
        "tokens, as in tokens+pairs:28000.\n"
    )
    assert refused(capsys, *SMALL, "--cost", "tokens+pairs:0") == (
        "The break-even length is 0 tokens. Give one above 0: published ones lie near 30,000 to "
        "200,000, and inf counts only tokens.\n"
    )
    assert refused(capsys, "--plot", "packs.gif") == (
        '--plot packs.gif: a picture\'s name ends in .png, .svg or .pdf, not ".gif". Try '
        "packs.png.\n"
    )
    missing = tmp_path / "no" / "packs.jsonl"
    assert refused(capsys, "--out", str(missing)) == (
        f"--out {missing}: there is no folder {missing.parent}. Create it first.\n"
    )
    assert refused(capsys, "--out", "/proc/packs.jsonl") == (
        "--out: no file can be written in /proc: no such file or directory. Give one in another "
        "folder.\n"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refused(capsys, *SMALL, "--quiet", "--out", str(folder)) == (
        f"--out {folder} is a folder. Give a file in it.\n"
    )


def test_odd_lengths_are_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--context-tokens", "64", "--micro-batches", "3", "--steps", "2")
    for lengths in ([1000], [64] * 9, [1] * 500, [63, 64, 65, 127, 1], sorted(range(1, 60))):
        file = tmp_path / "lengths.txt"
        file.write_text("\n".join(map(str, lengths)))
        found = rows(capsys, "--lengths", str(file), *argv)
        assert len(found) == 9
        assert all(row["max_tokens_ratio"] <= 1 for row in found)


def test_fewer_documents_than_micro_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("300\n")
    argv = (
        "--lengths",
        str(file),
        "--context-tokens",
        "100",
        "--micro-batches",
        "1",
        "--steps",
        "1",
    )
    assert rows(capsys, *argv, "--policy", "by-work")[0]["documents"] == 1
    file.write_text("1000\n")
    argv = ("--lengths", str(file), "--pack.context_tokens", "1000", "--pack.step_tokens", "1000")
    assert refused(capsys, *argv, "--layout.dp", "2", "--steps", "1", "--policy", "by-work") == (
        "A step of 1,000 tokens holds 1 documents for 2 ranks, and by-work packs whole documents. "
        "Smallest changes that fit: layout.dp = 1, or a larger pack.step_tokens.\n"
    )


def test_both_skews_are_shown_where_ranks_run_several_micro_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.toml"
    lengths = ("--lengths", "wikipedia", "--steps", "4", "--model", "llama3-8b")
    lengths += ("--policy", "by-work")
    found = {}
    for zero in (1, 3):
        run.write_text(
            "[pack]\ncontext_tokens = 8192\nstep_tokens = 262144\n"
            f"[layout]\ndp = 8\nzero = {zero}\n"
        )
        [found[zero]] = rows(capsys, str(run), *lengths)
        assert main(["pack", str(run), *lengths]) == 0
        said = " ".join(capsys.readouterr().out.split())
        meets = {1: "as under ZeRO 2 and 3", 3: "as this layout's do"}[zero]
        assert f"by turn: the same where ranks meet in every micro-batch, {meets}." in said
        assert f"{found[zero]['skew']:.3f} │ {found[zero]['turn_skew']:.3f}" in said
    assert found[1]["skew"] <= 1.001 and found[1]["turn_skew"] >= 1.02
    assert found[3]["turn_skew"] <= 1.005


def test_ranks_with_nothing_to_do_count_in_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("tokens\n" + "8192\n" * 3)
    argv = ("--lengths", str(lengths), "--context-tokens", "8192", "--steps", "1")
    for policy in ("bytescale", "gangs", "by-tokens", "in-order"):
        [row] = rows(capsys, *argv, "--micro-batches", "3", "--policy", policy)
        assert row["skew"] == pytest.approx(1.0)
    # Two documents of a window leave two of four bins idle.
    run = tmp_path / "run.toml"
    run.write_text("[pack]\ncontext_tokens = 8192\nstep_tokens = 16384\n[layout]\ndp = 4\n")
    [row] = rows(capsys, str(run), *argv, "--policy", "bytescale")
    assert row["skew"] == row["turn_skew"] == pytest.approx(2.0)


def test_a_list_is_packed_as_a_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3000\n40\n900\n")
    argv = ("--context-tokens", "4096", "--micro-batches", "2", "--policy", "by-work")
    listed = rows(capsys, "--lengths", "3000,40,900", *argv)
    assert [row["skew"] for row in listed] == [
        row["skew"] for row in rows(capsys, "--lengths", str(lengths), *argv)
    ]
    assert refused(capsys, "--lengths", "3000,0", *argv) == (
        '--lengths 3000,0: "0" is not a length. Give whole numbers of tokens, as in 3000,40,900.\n'
    )


def test_it_says_whether_dividing_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("tokens\n" + "20000\n" * 105)
    argv = ("--lengths", str(lengths), "--context-tokens", "32768", "--steps", "1")
    argv += ("--micro-batches", "64", "--model", "llama3-8b")
    [row] = rows(capsys, *argv, "--policy", "divided")
    assert 0 < row["fragments"] <= 63
    assert row["travel_bytes"] < 100 * 2**30
    assert row["step_s"] < row["whole_step_s"]
    assert main(["pack", *argv, "--policy", "divided"]) == 0
    said = capsys.readouterr().out
    saved = 1 - row["step_s"] / row["whole_step_s"]
    sent = format_bytes(int(row["travel_bytes"]))
    assert f"divided sends {sent} a step and takes {saved:.1%} less time than by-work." in said
    assert "Travel is priced at 0.1 of a token's linear layers for each token sent." in said
    chat = tmp_path / "chat.csv"
    chat.write_text("tokens\n" + "\n".join(str(100 + 37 * n % 5000) for n in range(4000)))
    argv = ("--lengths", str(chat), *argv[2:])
    [row] = rows(capsys, *argv, "--policy", "bytescale")
    assert row["step_s"] > row["whole_step_s"]
    assert main(["pack", *argv, "--policy", "bytescale"]) == 0
    longer = row["step_s"] / row["whole_step_s"] - 1
    assert (
        f"bytescale cuts no document and takes {longer:.1%} longer than by-work: by-work is "
        "faster here."
    ) in " ".join(capsys.readouterr().out.split())
    assert main(["pack", *argv, "--policy", "divided"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "divided cuts no document and takes as long as by-work." in said
    [row] = rows(capsys, *argv, "--policy", "by-work")
    assert row["whole_step_s"] is None


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut_off_at_any_width(width: int) -> None:
    """On a real terminal, which the command asks how wide it is."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    argv = ["--lengths", "pretrain-128k", "--context-tokens", "131072", "--micro-batches", "8"]
    command = [sys.executable, "-m", "equipoise.cli.main", "pack", *argv, "--steps", "2"]
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=kept | {"TERM": "xterm"},
    ) as process:
        os.close(theirs)
        out = b""
        with suppress(OSError):  # EIO: nobody writes any more
            while more := os.read(ours, 65536):
                out += more
    os.close(ours)
    assert process.returncode == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.decode()).splitlines()
    table = [line.rstrip() for line in plain if "│" in line or "┃" in line]
    assert len(table) == 10
    assert max(map(len, table)) <= width
    assert "…" not in "".join(table)
    assert {"policy", "skew", "cuts"} <= set(table[0].replace("┃", " ").split())
