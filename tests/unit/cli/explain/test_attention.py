"""``equipoise explain attention``: the pictures on the console, the JSON, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from equipoise.balance.context.sharding import split_context
from equipoise.base.units import format_bytes, format_seconds
from equipoise.cli.main import main
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.attention.strategies import STRATEGIES, write_attention

PAGE = Path(__file__).parents[4] / "docs" / "your-code" / "context-parallelism.md"
SMALL = ("--lengths", "300,40,90", "--ranks", "2", "--model", "2m")


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["explain", "attention", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    return json.loads(shown(capsys, *argv, "--json"))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["explain", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_defaults_show_who_holds_moves_and_computes_what(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys)
    words = " ".join(out.split())
    assert words.startswith(
        "needed-kv, mixed sharding. 32,768 tokens of 5 documents (an example) over 4 ranks; one "
        "layer of llama3-8b: 32 query heads, 8 key/value heads of width 128, causal mask, bf16. "
        "document tokens who holds them, a character for 333 tokens 0 24,000 1111"
    )
    assert (
        "218.5 MiB sent forward, 437.0 MiB backward, in 24 messages; skew of pairs 1.007" in words
    )
    assert words.endswith(
        "Times are predicted, not measured, for 400 TFLOP/s a rank in blocks of 128, 5 us a tile, "
        "links of 10 us and 50 GB/s (assumed)."
    )
    for text in ("kv 32.0 MiB to 0, 1, 2", "rank 3 ", "| backward ", "digits: the round"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 120


def test_a_row_for_each_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--strategy", "all")
    rows = [line.split("│")[1:3] for line in out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        *([name, "mixed"] for name in STRATEGIES),
        ["rsa", "contiguous"],
    ]
    assert "Strategies in two levels take nodes of 2." in " ".join(out.split())
    assert "…" not in out  # nothing is cut off
    quiet = shown(capsys, "--strategy", "all", "--quiet").splitlines()
    assert [line.partition(",")[0] for line in quiet] == [*STRATEGIES, "rsa"]


def test_the_page_shows_what_the_tool_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    shown_rows = [line for line in page.splitlines() if line.endswith("% |")]
    answer = told(capsys, "--strategy", "all")
    for row, each in zip(shown_rows, answer["strategies"], strict=True):
        forward, backward = (
            format_bytes(each[f"{name}_bytes"]) for name in ("forward", "backward")
        )
        skew = f"{each['pair_skew']:.3f}"
        time = format_seconds(each["predicted_s"])
        share = f"{each['predicted_exposed_s'] / each['predicted_s']:.0%}"
        way = format_bytes(each["in_flight_bytes"])
        cells = (f"`{each['name']}`", f"`{each['sharding']}`", forward, backward)
        cells += (f"{each['messages']}", skew, way, time, share)
        assert row == f"| {' | '.join(cells)} |"
        beside = f"Sent: {forward} forward, {backward} backward, {each['messages']} messages. "
        assert f"{beside}Skew of pairs: {skew}." in page
        picture = f"../images/attention/{each['name']}.svg"
        assert f"({picture})" in page
        assert (PAGE.parent / picture).is_file()
    homes = [rank["home"] for rank in answer["strategies"][1]["by_rank"]]
    assert {d for home in homes[1:] for d, *_ in home}.isdisjoint({1, 3, 4})
    for flags, said in (
        (("--strategy", "ring", "--sharding", "head-tail-document"), "is hidden (12.8 ms)"),
        (("--strategy", "double-ring", "--ranks-per-node", "2"), "and 12.0 ms are predicted"),
    ):
        [each] = told(capsys, *flags)["strategies"]
        assert said in page
        assert format_seconds(each["predicted_s"]) in said


def test_many_ranks_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(
        capsys,
        *("--strategy", "double-ring", "--ranks", "8", "--ranks-per-node", "4"),
        *("--lengths", "pretrain-128k", "--context-tokens", "65536"),
    )
    words = " ".join(out.split())
    assert "65,536 tokens of 23 documents (first window of pretrain-128k) over 8 ranks" in words
    assert "and 11 shorter ones" in out
    assert "most pairs of a rank" in out
    assert "--text prints what each rank does in each round." in out
    assert "links of 10 us and 450 GB/s within a node, 10 us and 50 GB/s between nodes" in words


def test_json_holds_what_the_schedule_counts(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, *SMALL, "--strategy", "all", "--dtype", "fp32")
    assert answer["documents"] == [300, 40, 90]
    assert answer["model"] == {"name": "2m", "heads": 4, "kv_heads": 2, "head_width": 32}
    assert answer["assumed"] == {
        "flop_per_s": 4e14,
        "block_tokens": 128,
        "tile_s": 5e-6,
        "link": {"latency_s": 1e-5, "bytes_per_s": 5e10},
        "link_in_node": None,
    }
    assert [each["name"] for each in answer["strategies"]] == [*STRATEGIES, "rsa"]
    for each in answer["strategies"]:
        sharding = "contiguous" if each["name"] == "rsa" else "mixed"
        assert each["sharding"] == sharding
        home = split_context([300, 40, 90], 2, sharding).pieces
        schedule = write_attention(
            each["strategy"], home, [300, 40, 90], heads=4, kv_heads=2, ranks_per_node=1
        )
        counts = count_attention(schedule, Wire(32, 4, 4))
        assert each["digest"] == schedule.digest
        assert each["links"]["forward_bytes"] == counts.forward_bytes.tolist()
        assert each["backward_bytes"] == counts.backward_bytes.sum()
        assert each["messages"] == 2 * counts.messages.sum()
        assert each["pair_skew"] == counts.pair_skew
        assert [rank["pairs"] for rank in each["by_rank"]] == counts.pairs.tolist()
        assert [rank["home"] for rank in each["by_rank"]] == [part.tolist() for part in home]
        parts = [each[f"predicted_{part}_s"] for part in ("compute", "peers", "exposed")]
        assert sum(parts) == pytest.approx(each["predicted_s"])
        sent = [m for rank in each["by_rank"] for r in rank["rounds"] for m in r["sends"]]
        assert sum(m["forward_bytes"] for m in sent) == each["forward_bytes"]
        assert sum(m["backward_bytes"] for m in sent) == each["backward_bytes"]
        assert sum(flight["bytes"] for flight in each["backward"]) == each["backward_bytes"]
        tiles = [t for rank in each["by_rank"] for r in rank["rounds"] for t in r["tiles"]]
        assert len(tiles) == counts.tiles.sum()


def test_rsa_is_the_ring_over_contiguous_shares(capsys: pytest.CaptureFixture[str]) -> None:
    [rsa] = told(capsys, *SMALL, "--strategy", "rsa")["strategies"]
    ring = told(capsys, *SMALL, "--strategy", "ring", "--sharding", "contiguous")["strategies"][0]
    assert (rsa.pop("name"), ring.pop("name")) == ("rsa", "ring")
    assert rsa == ring


def test_text_is_the_whole_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    home = split_context([300, 40, 90], 2, "head-tail").pieces
    schedule = write_attention("pass-q", home, [300, 40, 90], heads=4, kv_heads=2)
    argv = ("--strategy", "pass-q", "--sharding", "head-tail", "--text")
    assert shown(capsys, *SMALL, *argv) == f"{schedule}\n"


def test_faster_links_expose_less(capsys: pytest.CaptureFixture[str]) -> None:
    exposed = [
        told(capsys, "--strategy", "ring", *flags)["strategies"][0]["predicted_exposed_s"]
        for flags in (("--link", "10:5"), (), ("--link", "0:5000"), ("--tflop-per-s", "40000"))
    ]
    assert exposed[0] > exposed[1] > exposed[2] >= 0
    assert exposed[3] > 2 * exposed[1]  # who computes sooner hides less


@pytest.mark.parametrize("lengths", ["1", "5,0,3", "7,"])
def test_packs_of_next_to_nothing(capsys: pytest.CaptureFixture[str], lengths: str) -> None:
    argv = ("--lengths", lengths, "--ranks", "3")
    for strategy in ("needed-kv", "usp", "all"):
        assert "(assumed)." in shown(capsys, *argv, "--strategy", strategy)
    assert told(capsys, *argv)["strategies"][0]["pair_skew"] >= 1


def test_the_documents_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("50\n70\n30\n")
    run = tmp_path / "run.toml"
    run.write_text('[model]\npreset = "7m"\n[pack]\ncontext_tokens = 64\n')
    answer = told(capsys, str(run), "--lengths", str(lengths))
    assert sum(answer["documents"]) == 64
    assert answer["model"]["name"] == "7m"
    assert answer["origin"] == f"first window of {lengths}"
    assert (answer["ranks"], answer["strategies"][0]["name"]) == (1, "needed-kv")
    run.write_text(
        run.read_text() + '[layout]\ncp = 4\nstrategy = "usp"\nsharding = "head-tail"\n'
        "ranks_per_node = 2\n"
    )
    answer = told(capsys, str(run), "--lengths", "50,70")
    [usp] = answer["strategies"]
    assert (usp["name"], usp["sharding"]) == ("usp", "head-tail")
    assert (answer["ranks"], answer["ranks_per_node"]) == (4, 2)
    assert answer["assumed"]["link_in_node"] == {"latency_s": 1e-5, "bytes_per_s": 4.5e11}
    [ring] = told(capsys, str(run), "--lengths", "50,70", "--strategy", "ring")["strategies"]
    assert (ring["name"], ring["sharding"]) == ("ring", "head-tail")
    answer = told(capsys, "--model.heads", "2", "--model.kv_heads", "1", "--layout.dp", "8")
    assert (answer["model"]["heads"], answer["ranks"]) == (2, 4)


def test_a_window_sends_and_computes_less(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [told(capsys, *SMALL, "--mask", mask) for mask in ("full", "causal", "window:50")]
    assert [each["mask"] for each in asked] == ["full", "causal", "window 50"]
    pairs = [sum(rank["pairs"] for rank in each["strategies"][0]["by_rank"]) for each in asked]
    heads = 4
    assert pairs[0] == heads * (300**2 + 40**2 + 90**2)
    assert pairs[1] == heads * (300 * 301 + 40 * 41 + 90 * 91) // 2
    assert pairs[2] == heads * (50 * 51 // 2 * 2 + 50 * (250 + 40) + 40 * 41 // 2)
    sent = [each["strategies"][0]["forward_bytes"] for each in asked]
    assert sent[0] > sent[1] > sent[2] > 0


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ring.svg"
    assert shown(capsys, *SMALL, "--strategy", "ring", "--plot", str(file)).endswith(f"{file}\n")
    assert file.read_text().startswith("<?xml")


def test_explaining_loads_no_torch_and_no_matplotlib() -> None:
    code = (
        "import sys\n"
        "from equipoise.cli.main import main\n"
        "main(['explain', 'attention', '--quiet'])\n"
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "attention", "--most-held", "3") == (
        "equipoise explain attention: --most-held: no such flag. Nearest: --model\n"
    )
    assert refused(capsys, "attention", "--layout.strateg", "ring") == (
        "--layout.strateg: no such key. Nearest: --layout.strategy\n"
    )
    assert refused(capsys, "attention", "--strategy", "ringg") == (
        '--strategy: "ringg" is not one of all, all-gather, needed-kv, ring, double-ring, pass-q, '
        'token-ring, gather-q, ulysses, usp, rsa. Nearest: "ring".\n'
    )
    assert refused(capsys, "attention", "--ranks", "0") == (
        "--ranks 0 is below 1. Give 1 or more.\n"
    )
    assert refused(capsys, "attention", "--ranks-per-node", "3") == (
        "--layout.ranks_per_node: 3 does not divide layout.cp = 4 (--layout.cp). Nearest: 2.\n"
    )
    assert refused(capsys, "attention", "--mask", "window") == (
        '--mask: "window" is not causal, full, or a window as in window:4096.\n'
    )
    assert refused(capsys, "attention", "--strategy", "rsa", "--sharding", "mixed") == (
        '--strategy rsa is the ring over contiguous shares, and --sharding says "mixed". Say '
        "--strategy ring.\n"
    )
    assert refused(capsys, "attention", "--lengths", "300,x") == (
        '--lengths 300,x: "x" is not a length. Give whole numbers of tokens, as in 3000,40,900.\n'
    )
    assert refused(capsys, "attention", "--lengths", "0,0") == (
        "--lengths 0,0: there is no token to attend to. Give lengths.\n"
    )
    assert refused(capsys, "attention", "--link", "fast") == (
        '--link: "fast" is not a latency in us and a bandwidth in GB/s, as in 10:50.\n'
    )
    assert refused(capsys, "attention", "--plot", "ring.gif") == (
        '--plot ring.gif: a picture\'s name ends in .png, .svg or .pdf, not ".gif". Try ring.png.\n'
    )
    missing = tmp_path / "no" / "ring.png"
    assert refused(capsys, "attention", "--plot", str(missing)) == (
        f"--plot {missing}: there is no folder {missing.parent}. Create it first.\n"
    )


def test_lengths_survive_the_way_through_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, *SMALL)
    homes = [np.array(rank["home"]) for rank in answer["strategies"][0]["by_rank"]]
    pieces = np.concatenate(homes)
    assert np.bincount(pieces[:, 0], pieces[:, 2] - pieces[:, 1]).tolist() == [300, 40, 90]
