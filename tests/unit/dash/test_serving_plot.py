"""Pictures of served traces: a line for each name, and the same bytes again."""

from pathlib import Path

from equipoise.dash.serving.plot import plot_tenants
from equipoise.sim.serve.answer import Objective
from equipoise.sim.serve.request import ServingRequest, simulate_serving
from equipoise.spec.request_trace import TracedRequest


def test_a_picture_has_a_line_for_each_tenant_and_is_the_same_again(tmp_path: Path) -> None:
    trace = [
        TracedRequest(0.1 * at, (r"$\frac", "_free$")[at % 2], 300, at % 9, 9) for at in range(40)
    ]
    answer = simulate_serving(
        ServingRequest(trace, "llama3-8b", "h100-sxm:1", "tp=1", objectives={"": Objective(0.1)})
    )
    files = [tmp_path / name for name in ("one.svg", "two.svg")]
    for file in files:
        plot_tenants(file, answer)
    text = files[0].read_text()
    assert text == files[1].read_text()
    for colour in ("#4c7aae", "#c8553d"):
        assert text.count(f"stroke: {colour}") >= 3, "both panels, and the legend"
    assert "stroke-dasharray" in text
    assert "<!-- $\\frac -->" in text and "<!--  _free$ -->" in text, "names are not formulas"
