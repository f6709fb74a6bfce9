"""Towers in run.toml: what cannot be is refused in one sentence."""

from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.recommend import read_recommend

RUN = """\
[model]
kind = "recommend"
width = 8
[data]
path = "clicks.csv"
ids = ["user", "ad"]
bags = ["words"]
"""
TWO = '[["user"], ["ad", "words"]]'
WRONG = [
    (
        {"model.tower_width": "4"},
        "model.tower_module, tower_vectors and tower_width need model.towers, the columns of each "
        "tower. Give it, or leave them out.",
    ),
    (
        {"model.towers": '[["user"], ["ad"], ["words"], []]'},
        "model.towers has 4 towers, 3 of them with columns, for 3 columns of ids. Give at most 3 "
        "towers, each with a column.",
    ),
    (
        {"model.towers": '[["usr"], ["ad", "words"]]'},
        'model.towers: "usr" is not among data.ids and data.bags. Nearest: "user".',
    ),
    (
        {"model.towers": '[["user", "ad"], ["ad", "words"]]'},
        'model.towers names "ad" twice. Name it once.',
    ),
    (
        {"model.towers": '[["user"], ["ad"]]'},
        "model.towers leaves out words. Put every column of data.ids and data.bags into one tower.",
    ),
    (
        {"model.towers": TWO, "model.tower_vectors": "1"},
        'model.tower_module = "identity" passes vectors on as they are. Leave out '
        'model.tower_vectors and model.tower_width, or choose "linear" or "cross".',
    ),
    (
        {"model.towers": TWO, "model.tower_module": "linear"},
        'model.tower_module = "linear" has nothing to do. Give model.tower_vectors, '
        "model.tower_width or both.",
    ),
    (
        {"model.towers": TWO, "model.tower_module": "cross", "model.tower_vectors": "2"},
        "model.tower_vectors = 2 is more than the 1 vectors that enter tower 1. Give at most 1.",
    ),
    (
        {"model.towers": TWO, "model.tower_module": "linear", "model.tower_width": "9"},
        "model.tower_width = 9 is more than model.width = 8. Give at most 8.",
    ),
    (
        {"model.towers": TWO, "tables.deduplicate": '[["user"]]'},
        "model.towers and tables.deduplicate: a tower condenses each sample's own rows. Leave one "
        "of them out.",
    ),
    (
        {"model.towers": TWO, "layout.dp": "3", "layout.ranks_per_host": "2"},
        "layout.dp = 3 does not fill hosts of layout.ranks_per_host = 2. Give a multiple of 2.",
    ),
    (
        {"model.towers": TWO, "layout.dp": "6", "layout.ranks_per_host": "2"},
        "model.towers has 2 towers for 3 hosts (layout.dp = 6, layout.ranks_per_host = 2), and "
        "each host holds as many whole towers. Give a multiple of 3.",
    ),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_what_cannot_be_is_refused(flags: dict[str, str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    with pytest.raises(SpecError) as error:
        read_recommend(file, list(flags.items()))
    assert str(error.value) == message


def test_floats_that_leave_a_tower(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    flags = {"model.towers": TWO, "model.tower_module": "linear", "model.tower_width": "4"}
    model = read_recommend(file, list(flags.items()))[0].model
    assert model.tower_sizes.compression(model.towers) == 2.0
    flags["model.tower_vectors"] = "1"
    model = read_recommend(file, list(flags.items()))[0].model
    assert model.tower_sizes.compression(model.towers) == 3.0
