"""Draw what ``equipoise drill --bit-flips --json`` printed: give its file, and an SVG to write."""

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

_COLUMNS = ("pvf", "sign", "exponent", "mantissa high", "mantissa low")


def main() -> None:
    """A panel for each dtype of the decoder: components by bit field, darker is worse."""
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "bit-flips", "font.size": 9}
    answer = json.loads(Path(sys.argv[1]).read_text())
    models = [each for each in answer["models"] if each["model"] == "decoder" and each["uniform"]]
    rows = max(len(each["components"]) for each in models)
    figure = Figure(figsize=(9, 0.6 + 0.3 * rows), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for panel, model in zip(panels, models, strict=True):
        shares = [
            [each["pvf"], *(each["fields"][name]["pvf"] for name in _COLUMNS[1:])]
            for each in model["components"]
        ]
        panel.imshow(shares, vmin=0, vmax=1, cmap="Oranges", aspect="auto")
        for at, row in enumerate(shares):
            for column, share in enumerate(row):
                colour = "white" if share > 0.7 else "black"
                panel.text(column, at, f"{share:.2f}", ha="center", va="center", color=colour)
        panel.set_xticks(
            range(len(_COLUMNS)), ["any bit", *(each.replace(" ", "\n") for each in _COLUMNS[1:])]
        )
        panel.set_yticks(range(len(shares)), [each["component"] for each in model["components"]])
        panel.set_title(f"share of harmful flips, {model['dtype']}", fontsize=9)
        panel.tick_params(length=0)
    figure.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()
