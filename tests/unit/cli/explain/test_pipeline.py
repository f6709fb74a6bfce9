"""``equipoise explain pipeline``: the picture, the table, the trace, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from equipoise.balance.packing.divided import macro_units
from equipoise.balance.packing.pack import batch_ns, pack_step
from equipoise.balance.stage import price_layers, price_stages, split_model
from equipoise.cli.explain.pipeline_table import draw_lanes
from equipoise.cli.main import main
from equipoise.cost.curve import counted_curve
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import replay_pipeline
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.catalog import LOSSY, SCHEDULES
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import PackSpec

PAGE = Path(__file__).parents[4] / "docs" / "train" / "pipeline-schedules.md"
ROWS = [
    *(("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1)),
    *(("interleaved-zb", 2), ("zb-v", 2), ("dualpipe-v", 2), ("v-half", 2), ("v-min", 2)),
    *(("auto", 1), ("auto", 2), ("skip-partial", 2), ("skip-reordered", 2)),
]
PACKED = ("--ranks", "8", "--micro-batches", "32", "--lengths", "pretrain-128k")
PACKED += ("--context-tokens", "131072")


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["explain", "pipeline", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    return json.loads(shown(capsys, *argv, "--json"))


def test_the_defaults_show_a_step_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys)
    words = " ".join(out.split())
    assert words.startswith(
        "1f1b, 4 stages. 8 micro-batches of 8,192 tokens, of 8 documents or pieces of one (an "
        "example, all alike; packed by the policy by-work); the heaviest is 1.000x the mean. "
        "llama3-8b, 32 layers on 4 ranks, bf16, recompute none."
    )
    assert words.endswith(
        "Times are predicted, not measured, for 400 TFLOP/s a rank, links of 10 us and 50 GB/s "
        "(assumed)."
    )
    assert "predicted step 2.75 s, 1.226x the lower bound of 2.24 s; bubble 27.9%" in words
    assert "above: the micro-batch; below: F forward, B backward; dots: waiting." in words
    lines = out.splitlines()
    assert max(map(len, lines)) <= 120
    at = next(at for at, line in enumerate(lines) if line.startswith("rank 3 "))
    assert lines[at + 1].strip().strip("·").replace("FF", "F").count("FB") == 8


def test_a_row_for_each_strategy_as_the_page_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--strategy", "all")
    page = PAGE.read_text()
    table = [line.strip() for line in out.splitlines() if line.startswith(" ") and line.strip()]
    assert [(row.split()[0], int(row.split()[1]) // 4) for row in table[2:]] == ROWS
    shown_rows = {line.strip() for line in page.splitlines()}
    assert set(table) <= shown_rows
    assert "Not run" not in out
    assert "…" not in out  # nothing is cut off
    quiet = shown(capsys, "--strategy", "all", "--quiet").splitlines()
    assert [line.partition(":")[0].partition(",")[0] for line in quiet] == [n for n, _ in ROWS]
    assert all(
        line.endswith(" Assumed: 400 TFLOP/s a rank, links of 10 us and 50 GB/s.") for line in quiet
    )


def test_the_page_shows_what_packs_do(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        line.split("|")[1].strip(" `"): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in PAGE.read_text().splitlines()
        if line.startswith(("| `in-order`", "| `by-tokens`", "| `by-work`", "| `divided-in-time`"))
    }
    assert len(rows) == 4
    for policy, cells in rows.items():
        for at, flags in enumerate((("1f1b",), ("1f1b", "--arranged"), ("auto",)), start=1):
            answer = told(capsys, *PACKED, "--policy", policy, "--strategy", *flags)
            [each] = answer["strategies"]
            loads = [batch["layer_forward_s"] for batch in answer["micro_batches"]]
            assert cells[0] == f"{max(loads) * len(loads) / sum(loads):.3f}"
            assert cells[at] == f"{each['predicted_s'] / each['bound_s']:.3f}"


def test_json_holds_what_the_replay_says(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [6000, 300, 512, 64, 1024, 80, 900]
    argv = ("--lengths", ",".join(map(str, lengths)), "--micro-batches", "4")
    argv += ("--model", "7m", "--ranks", "2", "--link", "20:5", "--tflop-per-s", "2")
    answer = told(capsys, *argv, "--policy", "divided-in-time", "--strategy", "all")
    model = preset("7m")
    curve = counted_curve(model, flop_per_s=2e12)
    pieces = np.array([[document, 0, tokens] for document, tokens in enumerate(lengths)])
    pack = PackSpec(context_tokens=2220, policy="divided-in-time")
    batches = pack_step(pieces, pack, 1, curve).ranks[0]
    assert [each["documents"] for each in answer["micro_batches"]] == [
        each.doc_tokens.tolist() for each in batches
    ]
    pieces_made = sum(len(each["documents"]) for each in answer["micro_batches"])
    assert answer["documents"] == len(lengths) < pieces_made
    units = macro_units(batches)
    assert answer["units"] == [list(unit) for unit in units]
    assert len(units) < len(batches)
    assert answer["assumed"] == {
        "flop_per_s": 2e12,
        "link": {"latency_s": 2e-5, "bytes_per_s": 5e9},
    }
    assert [(each["name"], each["stages_a_rank"]) for each in answer["strategies"]] == [
        *(("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("auto", 1), ("auto", 2))
    ]
    assert {each["strategy"] for each in answer["left_out"]} == set(SCHEDULES) - {
        *("gpipe", "1f1b", "auto")
    }
    layers = price_layers(curve, model, batches)
    hops = [2e4 + 1e9 * batch.tokens * model.hidden * 2 / 5e9 for batch in batches]
    unit_bytes = {
        batch["activation_bytes"] / sum(batch["documents"]) for batch in answer["micro_batches"]
    }
    assert len(unit_bytes) == 1
    for each in answer["strategies"]:
        stages = 2 * each["stages_a_rank"]
        split = split_model(layers, model, stages)
        prices = price_stages(split, layers, hop_ns=hops)
        schedule = write_pipeline(each["name"], prices, ranks=2, units=units)
        timeline = replay_pipeline(schedule, prices)
        assert each["predicted_s"] == timeline.makespan_ns / 1e9
        assert each["predicted_bubble_rate"] == timeline.bubble_rate
        assert each["layers"] == split.layers.tolist()
        assert each["digest"] == schedule.digest
        assert each["predicted_s"] >= each["bound_s"]
        busy = [
            sum(one["end_s"] - one["begin_s"] for one in rank["instructions"])
            for rank in each["by_rank"]
        ]
        assert busy == pytest.approx([rank["predicted_busy_s"] for rank in each["by_rank"]])
        total = sum(batch_ns(batch, curve) for batch in batches) / 1e9
        assert sum(busy) == pytest.approx(total, rel=1e-4)  # nothing is lost on the way


def test_lossy_strategies_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "--strategy", "all", "--skip", "0.5")
    by_name = {each["name"]: each for each in answer["strategies"]}
    for name, each in by_name.items():
        assert each["lossy"] == (name in LOSSY)
        assert (each["bound_s"] is None) == (name in LOSSY)
    assert by_name["skip-partial"]["predicted_s"] < by_name["auto"]["predicted_s"]
    assert "Lossy: it trains another model, as stages are left out." in " ".join(
        shown(capsys, "--strategy", "skip-partial").split()
    )


def test_a_bound_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "--strategy", "all", "--most-held", "3.5")
    assert [each["name"] for each in answer["strategies"]] == [
        *("v-half", "v-min", "auto", "auto", "skip-partial", "skip-reordered")
    ]
    for each in answer["strategies"]:
        held = [rank["held_bytes"] for rank in each["by_rank"]]
        assert max(held) <= answer["most_held_bytes"]
        assert max(rank["held_micro_batches"] for rank in each["by_rank"]) <= 3.5
    words = " ".join(shown(capsys, "--strategy", "all", "--most-held", "3.5").split())
    assert (
        "Not run: 1f1b, zb-h1, interleaved-zb, zb-v: each holds 27.0 GiB of activations on rank 0, "
        "23.7 GiB are allowed: 3.4 GiB too many." in words
    )
    assert "at most 23.7 GiB allowed" in words
    same = told(capsys, "--strategy", "auto", "--memory", str(answer["most_held_bytes"] / 2**30))
    assert same["strategies"][0]["digest"] == answer["strategies"][2]["digest"]


def test_recomputation_holds_less_and_takes_longer(capsys: pytest.CaptureFixture[str]) -> None:
    kept, again = (
        told(capsys, "--strategy", "zb-h1", "--train.recompute", recompute)["strategies"][0]
        for recompute in ("none", "full")
    )
    assert again["predicted_s"] > 1.2 * kept["predicted_s"]
    assert again["by_rank"][0]["held_bytes"] < kept["by_rank"][0]["held_bytes"] / 5


def test_lanes_show_what_ranks_compute() -> None:
    prices = make_prices(2, 2, 2, stages=4, micro_batches=3)
    step = replay_pipeline(write_pipeline("zb-v", prices, ranks=2), prices)
    lanes = draw_lanes(step, step.makespan_ns)
    for rank, (above, below) in enumerate(lanes):
        mine = step.rank == rank
        for op, stage, micro_batch, begin, end in zip(
            *(each[mine] for each in (step.op, step.stage, step.micro_batch)),
            *(each[mine] for each in (step.begin_ns, step.end_ns)),
            strict=True,
        ):
            letter = "FBIW"[op] if stage < 2 else "fbiw"[op]
            assert set(below[begin:end]) == {letter}
            assert set(above[begin:end]) == {str(micro_batch)}
        assert below.count("·") == step.idle_ns[rank]
    assert draw_lanes(step, 1)[0][0] in "012·"


def test_text_is_the_whole_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--strategy", "zb-h1", "--ranks", "2", "--micro-batches", "3", "--text")
    assert out.startswith("zb-h1: 3 micro-batches through 2 stages on 2 ranks\nrank 0: 0F0 0F1 ")


def test_a_picture_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    argv = ("--model", "2m", "--ranks", "2", "--micro-batches", "4")
    out = shown(capsys, *argv, "--plot", str(picture), "--trace", str(trace))
    assert out.endswith(f"{picture}\n{trace}\n")
    assert picture.read_text().startswith("<?xml")
    events = json.loads(trace.read_text())["traceEvents"]
    assert events[0]["args"]["name"] == (
        "1f1b, predicted for 400 TFLOP/s a rank, links of 10 us and 50 GB/s"
    )
    answer = told(capsys, *argv)
    drawn = [event for event in events if event["ph"] == "X"]
    said = [one for rank in answer["strategies"][0]["by_rank"] for one in rank["instructions"]]
    assert [event["ts"] for event in drawn] == pytest.approx([1e6 * one["begin_s"] for one in said])
    assert sum(event["ph"] == "s" for event in events) == 8  # 4 activations, 4 gradients


def test_a_document_is_counted_once_however_it_is_divided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["explain", "pipeline", "--lengths", "4000,100,100,100", "--micro-batches", "4"]
    assert main([*argv, "--policy", "divided-in-time"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "of 4 documents, divided into 7 pieces (--lengths; packed by the policy" in out
    assert main([*argv, "--policy", "divided"]) == 2
    assert capsys.readouterr().err == (
        'pack.policy = "divided" divides documents over all ranks at once, and layout.pp = 4 '
        "has ranks that compute one after another. Set layout.pp = 1, or pack.policy = "
        '"divided-in-time" or "by-work".\n'
    )
