"""equipoise plan: the same words as simulate, a lock that is resumed and explained, one sentence
for what cannot be."""

import json
from pathlib import Path

import pytest

from equipoise.cli.main import main
from support.verbs import plan

STEP = ["--context-tokens", "4096", "--step-sequences", "16"]
SMALL = ["--model", "layers=4,hidden=1024,heads=8,vocab=8000", "--cluster", "h100-sxm:4", *STEP]


def test_the_best_has_the_price_that_simulate_prints(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, *SMALL, "--json", "--layout", "zero=1", "--recompute", "none")
    assert code == 0
    lock = json.loads(out)
    best = lock["best"]
    flags = [part for flag, value in best["words"].items() for part in (f"--{flag}", value)]
    assert main(["simulate", *SMALL, *flags, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row.pop("sources") == lock["sources"]
    assert row == best["price"]
    assert set(lock["runners_up"][0]["price"]) == set(best["price"])
    steps = [each["price"]["step_s"] for each in (best, *lock["runners_up"])]
    assert len(steps) == 4 and steps == sorted(steps)
    assert lock["bound_s"] <= best["price"]["step_s"] and lock["gap"] <= 0.01
    assert best["words"]["recompute"] == "none" and "zero=1" in best["words"]["layout"]


def test_a_lock_is_written_resumed_and_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = [*SMALL, "--layout", "cp=1,zero=1", "--out", str(tmp_path), "--sources"]
    code, out, err = plan(capsys, *asked)
    assert code == 0 and "search: done in" in err and "a gap of " in out
    assert " J a token, $" in out and "without them the MFU is " in out
    assert "  peaks, memory bytes per s, host bytes per s, power w: NVIDIA H100" in out
    [best] = [line for line in out.splitlines() if line.startswith("1  ")]
    layout = out.partition(":")[0]
    assert best.removeprefix("1  ").startswith(f"{layout}  ")  # its row of the table
    lock = (tmp_path / "plan.lock").read_text()
    state = (tmp_path / "search.jsonl").read_text()
    assert len(state.splitlines()) == json.loads(lock)["priced"] + 1
    with (tmp_path / "search.jsonl").open("a") as file:
        file.write('{"row": 1, "st')  # killed while it wrote
    assert plan(capsys, *asked, "--quiet")[0] == 0
    assert (tmp_path / "plan.lock").read_text() == lock
    assert (tmp_path / "search.jsonl").read_text() == state
    file = str(tmp_path / "plan.lock")
    assert main(["explain", "plan", file, "--sources"]) == 0
    told = capsys.readouterr().out
    assert "seconds of the busiest rank" in told and "GiB of the fullest rank" in told
    assert told.splitlines()[-1].startswith("  under load: products x 1.13")
    assert not [line for line in told.splitlines() if line.startswith("logits") and line[6:] == ""]
    assert main(["explain", "plan", file]) == 0
    brief = capsys.readouterr().out.splitlines()
    assert brief[-1] == "--sources says where each number comes from."
    assert [*brief[:-1], *told.splitlines()[len(brief) - 1 :]] == told.splitlines()
    assert main(["explain", "plan", file, "--json"]) == 0
    written = json.loads(lock)
    assert json.loads(capsys.readouterr().out) | {"digest": written["digest"]} == written


def test_a_stale_lock(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("tokens\n" + "1000\n3000\n" * 50)
    asked = [*SMALL, "--layout", "tp=1,cp=1,pp=1", "--lengths", str(lengths)]
    assert plan(capsys, *asked, "--out", str(tmp_path), "--quiet")[0] == 0
    lengths.write_text("tokens\n" + "2000\n2000\n" * 50)
    assert main(["explain", "plan", str(tmp_path / "plan.lock")]) == 4
    assert capsys.readouterr().err == (
        f"{tmp_path}/plan.lock is stale: lengths changed since it was written. Plan again: "
        '"equipoise plan --model layers=4,hidden=1024,heads=8,vocab=8000 --cluster h100-sxm:4 '
        "--context-tokens 4096 --step-sequences 16 --layout tp=1,cp=1,pp=1 --lengths "
        f'{lengths} --out {tmp_path}".\n'
    )


def test_documents_are_planned_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fixed = ["--layout", "cp=1,pp=1,zero=1", "--json"]
    steps = []
    for text in ("512\n", "4096\n"):
        lengths = tmp_path / "lengths.txt"
        lengths.write_text(text * 4096)
        code, out, _ = plan(capsys, *SMALL, *fixed, "--lengths", str(lengths))
        assert code == 0
        steps.append(json.loads(out)["best"]["price"])
    assert steps[0]["step_s"] < steps[1]["step_s"]
    assert steps[0]["terms"]["attention"] < steps[1]["terms"]["attention"]


def test_an_export_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--layout", "tp=2,cp=1,pp=1,zero=1", "--recompute", "none", "--micro-batch", "2"]
    code, out, err = plan(capsys, *SMALL, *fixed, "--export", "megatron")
    assert code == 0 and err == ""
    at = out.splitlines().index("--micro-batch-size 2")
    assert out.splitlines()[at : at + 4] == [
        "--micro-batch-size 2",
        "--global-batch-size 16",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 1",
    ]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (
            ["--model", "llama3-70b", "--cluster", "h100-sxm:8", *STEP, "--offload", "none"],
            3,
            "llama3-70b does not fit h100-sxm:8: of 63,630 layouts the smallest needs 128.2 GiB "
            "on its fullest rank, which has 78.7. The smallest that would do, by doubling: "
            "h100-sxm:16.\n",
        ),
        (
            [*SMALL, "--layout", "tp=3"],
            2,
            "No layout of 4 devices carries 4 layers of 8 heads and 16 sequences a step with "
            "tp = 3. Give sequences that more data-parallel ranks divide, or fix less.\n",
        ),
        (
            [*SMALL, "--seconds", "0"],
            2,
            "seconds is 0. Give a time above 0.\n",
        ),
        (
            [*SMALL, "--seconds", "nan"],
            2,
            "seconds is nan. Give a time above 0.\n",
        ),
        (
            [*SMALL, "--seconds", "1e-9"],
            2,
            "Within 1e-09 s no layout that fits was found among 5,929. Give more seconds, or "
            "fix more of the layout.\n",
        ),
    ],
)
def test_what_cannot_be_planned(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, message: str
) -> None:
    found, out, err = plan(capsys, *argv, "--json")
    assert found == code
    assert json.loads(out) == {"error": message.rstrip(), "exit_code": code}
    assert err == message


def test_a_length_file_with_negative_lengths(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("100\n-3\n")
    code, _, err = plan(capsys, *SMALL, "--lengths", str(lengths))
    assert code == 2
    assert "-3" in err and "lengths.txt" in err and err.count("\n") == 1


def test_a_folder_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert plan(capsys, *SMALL, "--out", str(file)) == (
        2,
        "",
        f"{file} cannot be written: file exists. Choose another with --out.\n",
    )
    assert plan(capsys, *SMALL, "--out", str(file / "under")) == (
        2,
        "",
        f"{file}/under cannot be written: not a directory. Choose another with --out.\n",
    )


@pytest.mark.long
def test_a_vast_space_has_a_bound_and_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """17 million choices, which nobody lists."""
    vast = ["--model", "deepseek-v3", "--cluster", "h800:2048", "--precision", "fp8"]
    step = ["--context-tokens", "4096", "--step-sequences", "15360", "--program", "hai-llm"]
    code, out, _ = plan(capsys, *vast, *step, "--seconds", "4", "--json")
    lock = json.loads(out)
    best = lock["best"]["price"]
    assert code == 0 and lock["listed"] > 150_000
    assert best["memory_gib_max"] <= best["capacity_gib"]
    assert 0 < lock["bound_s"] <= best["step_s"]
    assert lock["gap"] == pytest.approx(best["step_s"] / lock["bound_s"] - 1)
    recipe = next(each for each in lock["remarks"] if "arXiv:2412.19437" in each)
    assert recipe.startswith("As published: pp=16,dp=128,ep=64,zero=1,virtual=2 dualpipe-v")


@pytest.mark.long
def test_sites_are_searched_by_recipes_and_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nodes = "".join(
        f'[[nodes]]\nname = "{name}"\ndevice = "h100-sxm"\nnodes = 8\n' for name in ("a", "b")
    )
    file = tmp_path / "sites.toml"
    file.write_text(f'name = "s"\nbetween = "roce-400"\ntrunk_gbit_per_s = 400\n{nodes}')
    words = ["--model", "mixtral-8x7b", "--cluster", str(file), "--context-tokens", "4096"]
    code, out, err = plan(capsys, *words, "--step-sequences", "256", "--seconds", "4", "--json")
    lock = json.loads(out)
    assert code == 0 and 0 < lock["bound_s"] <= lock["best"]["price"]["step_s"]
    assert (
        f"On several sites, or with layers of their own, only the {lock['listed']:,} choices that "
        "published recipes differ in were searched. A faster one may be among the others. Fix more "
        "of the layout to search all.\n"
    ) in err
