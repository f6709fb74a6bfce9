"""run.toml of a recommender: its own keys, every fault at its line."""

from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.recommend import is_recommend, read_recommend

RUN = """\
name = "clicks"
[model]
kind = "recommend"
top = [8]
[data]
path = "clicks.csv"
ids = ["user", "ad"]
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


def test_a_file_and_flags(run_toml: Path) -> None:
    flags = [("train.epochs", "7"), ("layout.dp", "4"), ("data.label", "7")]
    spec, base = read_recommend(run_toml, flags)
    assert (spec.name, spec.model.top, spec.data.ids) == ("clicks", (8,), ("user", "ad"))
    assert (spec.train.epochs, spec.layout.dp, spec.data.label) == (7, 4, "7")
    assert base == run_toml.parent
    assert is_recommend(run_toml)
    assert is_recommend(None, [("model.kind", "recommend")])
    assert not is_recommend(None)


def test_every_fault_is_reported_at_its_line(run_toml: Path) -> None:
    run_toml.write_text(RUN + "[train]\nepochs = 0\nbatches = 5\n")
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml, [("tables.wire", "int4")])
    assert str(error.value).splitlines() == [
        "run.toml:9  train.epochs: input should be greater than or equal to 1, got 0.",
        "run.toml:10  train.batches: no such key. Nearest: train.batch",
        "--tables.wire: input should be 'fp32', 'bf16', 'fp16' or 'int8', got 'int4'.",
    ]


def test_a_key_that_the_architecture_does_not_read_is_refused(run_toml: Path) -> None:
    run_toml.write_text(RUN.replace("top = [8]", "top = [8]\nlayers = 3"))
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml, [("model.modules", '["dot"]')])
    assert str(error.value).splitlines() == [
        'run.toml:5  model.layers: model.architecture = "dlrm" does not read it; dcn, dhen, wukong '
        "do. Leave it out.",
        '--model.modules: model.architecture = "dlrm" does not read it; dhen does. Leave it out.',
    ]
    spec, _ = read_recommend(run_toml, [("model.architecture", "dcn")])
    assert (spec.model.architecture, spec.model.layers) == ("dcn", 3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('ids = ["user", "ad"]\n', "", "data.ids and data.bags are empty, so there is no table."),
        ('path = "clicks.csv"\n', "", "data.path is missing. Set it to a Parquet, CSV or TSV"),
        ('"user", "ad"', '"ad", "ad"', "data.ids and data.bags name one column twice."),
    ],
)
def test_a_run_without_tables_is_refused(run_toml: Path, old: str, new: str, message: str) -> None:
    run_toml.write_text(RUN.replace(old, new))
    with pytest.raises(SpecError) as error:
        read_recommend(run_toml)
    assert str(error.value).startswith(message)
