"""``equipoise explain boxing``: the cheapest path beside others, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.schedule.attention.price import LinkPrice
from equipoise.schedule.boxing.path import BoxingRequest, plan_boxing
from equipoise.schedule.boxing.placement import MeshTensor, read_placements
from equipoise.schedule.boxing.ways import other_ways

PAGE = Path(__file__).parents[4] / "docs" / "your-code" / "redistribution.md"
EXAMPLE = ("S(0), P -> B, S(1)", "--link", "10:50,5:450")


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["explain", "boxing", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["explain", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.strip()


def test_the_cheapest_path_stands_beside_others(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, *EXAMPLE)
    words = " ".join(out.split())
    assert words.startswith(
        "S(0), P -> B, S(1): 4096x4096 bf16 (32.0 MiB) on a mesh of 2x4 ranks. The cheapest path: "
        "2 steps, predicted 136.8 us, 128.0 MiB sent by all ranks. step axes"
    )
    assert words.endswith(
        "Times are predicted, not measured, for links of 10 us and 50 GB/s along axis 0, 5 us and "
        "450 GB/s along axis 1 (assumed); packing and adding are not priced."
    )
    assert max(map(len, out.splitlines())) <= 120
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "reduce-scatter 1 S(0), S(1) 12.0 MiB 96.0 MiB 24 6 in 4 43.0 us" in rows
    assert "one step exchange 224.0 MiB 375.5 us 2.74x" in rows
    assert "axis by axis reduce-scatter, all-gather 128.0 MiB 136.8 us the same" in rows
    page = {" ".join(line.split()) for line in PAGE.read_text().splitlines()}
    assert {row for row in rows if row} - page == set(), "the page shows something else"


def test_json_is_what_python_says(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--mesh", "3x2", "--shape", "9x6x2", "--dtype", "fp32", "--link", "10:50")
    answer = json.loads(shown(capsys, "S(0: 3+0+2), P -> S(1), S(0)", *flags, "--json"))
    ends = read_placements("S(0: 3+0+2), P"), read_placements("S(1), S(0)")
    links = (LinkPrice(1e-5, 5e10),) * 2
    request = BoxingRequest(MeshTensor((9, 6, 2), (3, 2)), *ends, 4, links)
    ways = (plan_boxing(request), *other_ways(request))
    assert [each["name"] for each in answer["ways"]] == [each.name for each in ways]
    assert [each["predicted_s"] for each in answer["ways"]] == [each.seconds for each in ways]
    for told, way in zip(answer["ways"], ways, strict=True):
        assert told["sent_bytes"] == way.sent_bytes == int(way.link_bytes().sum())
        assert [each["sent_bytes"] for each in told["steps"]] == [
            each.sent_bytes for each in way.steps
        ]
        assert told["steps"][-1]["after"] == answer["after"] == "S(1), S(0)"
    assert (answer["before"], answer["mesh"], answer["dtype"]) == ("S(0: 3+0+2), P", [3, 2], "fp32")


def test_the_links_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    def links(mesh: str, cluster: str) -> list[tuple[float, float]]:
        ends = ", ".join("B" * (1 + mesh.count("x")))
        flags = ("--mesh", mesh, "--cluster", cluster, "--json")
        answer = json.loads(shown(capsys, f"{ends} -> {ends}", *flags))
        return [(each["latency_s"], each["bytes_per_s"]) for each in answer["links"]]

    nvlink, network = (2e-6, 0.75 * 450e9), (5e-6, 0.86 * 50e9)
    assert links("4x8", "h100-sxm:32") == [network, nvlink]
    assert links("8x4", "h100-sxm:32") == [network, nvlink]
    assert links("2x2x8", "h100-sxm:32") == [network, network, nvlink]
    assert links("2x4", "h100-sxm:32") == [nvlink, nvlink]
    assert links("2x16", "h100-sxm:32") == [network, network]
    assert links("1x8", "h100-sxm:8") == [nvlink, nvlink]
    dies, node = (3e-6, 0.75 * 200e9), (3e-6, 0.75 * 50e9)
    assert links("4x2", "mi250x:8") == [node, dies]
    out = shown(capsys, "P, P -> B, B", "--mesh", "4x8", "--cluster", "h100-sxm:32")
    assert "for links of 5 us and 43 GB/s along axis 0, 2 us and 337.5 GB/s along axis 1" in (
        " ".join(out.split())
    )
    assert "reduce-scatter" in out


def test_a_line_each_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "P -> B", "--mesh", "4", "--quiet").splitlines()
    assert lines == [
        "cheapest: P -> B; 1 step, predicted 1,066.6 us, 192.0 MiB sent by all ranks.",
        "one step: P -> B; 1 step, predicted 1,066.6 us, 192.0 MiB sent by all ranks.",
    ]


def test_nothing_to_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "S(0)->S(0)", "--mesh", "4").splitlines() == [
        "S(0) -> S(0): 4096x4096 bf16 (32.0 MiB) on a mesh of 4 ranks.",
        "There is nothing to do.",
    ]
    out = shown(capsys, "B, B -> S(0), S(1)")
    assert "1 step, predicted 0.0 us, 0 B sent by all ranks." in out
    assert "nan" not in out
    assert "inf" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("boxing", "S(0), P"),
            '"S(0), P" does not say from where to where. Write the placements before and after, as '
            'in "S(0), P -> B, S(1)".',
        ),
        (
            ("boxing", "S(0), P -> B, R"),
            '"R" is not a placement. Give S(dim), S(dim: 3+1) with the share of each rank, B, P or '
            "P(max), one for each mesh axis, as in S(0), B.",
        ),
        (
            ("boxing", "P -> B", "--mesh", "2*4"),
            '--mesh: "2*4" is not sizes with x between them, as in 2x4.',
        ),
        (
            ("boxing", "P -> B", "--shape", "4x-4"),
            '--shape: "4x-4" is not sizes with x between them, as in 2x4.',
        ),
        (
            ("boxing", "P -> B"),
            "P is 1 placement for a mesh of 2 axes (2x4). Give one for each axis.",
        ),
        (
            ("boxing", "P, B -> B, B", "--link", "1:2,3:4,5:6"),
            "--link 1:2,3:4,5:6: 3 links for a mesh of 2 axes. Give one for all, or one for each "
            "axis, outermost first, as in 10:50,5:450.",
        ),
        (
            ("boxing", "P, B -> B, B", "--link", "1:2,fast"),
            '--link: "fast" is not a latency in us and a bandwidth in GB/s, as in 10:50.',
        ),
        (
            ("boxing", "P, B -> B, B", "--cluster", "h100-sxm:4"),
            "--cluster h100-sxm:4 has 4 devices for a mesh of 8 ranks. Give one of 8 or more.",
        ),
        (
            ("boxing", "P, B -> B, B", "--cluster", "h100-sxm:8", "--link", "1:2"),
            "--link 1:2 and --cluster h100-sxm:8: both say what links there are. Give one of them.",
        ),
        (
            ("boxing", "P -> B", "--tflop-per-s", "300"),
            "equipoise explain boxing: --tflop-per-s: no such flag. Nearest: --dtype",
        ),
        (
            ("boxing", "P -> B", "run.toml"),
            'equipoise explain boxing: "run.toml" is one argument too many. See "equipoise explain '
            'boxing --help".',
        ),
        (
            ("boxing",),
            'equipoise explain boxing: needs FROM->TO. See "equipoise explain boxing --help".',
        ),
    ],
)
def test_what_is_refused(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *argv).removeprefix("error: ") == message


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from equipoise.cli.main import main; "
        "main(['explain', 'boxing', 'P, S(0) -> B, B']); "
        "assert not {'torch', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
