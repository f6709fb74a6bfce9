"""Steps that work for those after them change nothing, and do so before the steps end."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import CheckpointError, SpecError
from equipoise.comm.local import run_ranks
from equipoise.recsys.ahead.steps import StepsAhead
from equipoise.recsys.columns import read_columns
from equipoise.recsys.folder import read_prepared
from equipoise.recsys.lowbit.request import convert_run
from equipoise.recsys.rank.ranker import open_ranker
from equipoise.recsys.samples import read_samples
from equipoise.spec.recommend import read_recommend
from support.recsys.clicks import write_clicks
from support.recsys.early import Trained, train_both

ROW_WISE = ("tables.optimizer", "row-wise-adagrad")
FLAGS = {
    "plain": [],
    "rows by sessions": [
        ("tables.kinds", '["row"]'),
        ("tables.wire", "bf16"),
        ("tables.deduplicate", '[["user"]]'),
        ROW_WISE,
    ],
    "columns": [("tables.kinds", '["column"]'), ("tables.wire", "int8"), ROW_WISE],
    "few bits by trace": [("tables.precision", "int8"), ("tables.cache_policy", "trace")],
    "files": [("tables.memory_mib", "0.002")],
    "towers": [
        ("model.towers", '[["words", "user"], ["ad"]]'),
        ("model.tower_module", "cross"),
        ("model.tower_vectors", "1"),
        ("tables.wire", "bf16"),
        ("layout.ranks_per_host", "1"),
    ],
    "towers on a host": [
        ("model.towers", '[["ad", "words"], ["user"]]'),
        ("model.tower_module", "linear"),
        ("model.tower_width", "3"),
        ("model.pooling", "sum"),
        ("tables.kinds", '["row", "column"]'),
    ],
}
STEPS = 24
"""Two epochs of 12, the last of each short; a checkpoint after every fifth."""


Sides = dict[str, list[tuple[Trained, Trained]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clicks")


@pytest.fixture(scope="module")
def sides(folder: Path) -> Sides:
    run_toml = write_clicks(folder)
    specs = [read_recommend(run_toml, flags)[0] for flags in FLAGS.values()]
    rows = run_ranks(2, train_both, folder, specs, folder)
    return {name: [row[at] for row in rows] for at, name in enumerate(FLAGS)}


@pytest.mark.parametrize("name", FLAGS)
def test_losses_weights_and_bytes_are_the_same_to_the_bit(sides: Sides, name: str) -> None:
    for early, plain in sides[name]:
        assert len(plain.losses) == STEPS
        assert early.losses == plain.losses
        assert early.best == plain.best
        assert early.arrays.keys() == plain.arrays.keys()
        for key, array in plain.arrays.items():
            assert np.array_equal(early.arrays[key], array), key
        # Stopped after step 9, the run went on from its checkpoint of step 5.
        gone = {row["step"]: row for row in early.steps}
        for row in plain.steps:
            for key in ("loss", "samples", "ids", "sent_bytes", "exchanges"):
                assert gone[row["step"]][key] == row[key]


def test_ids_leave_before_the_gradients_of_the_step_before(
    sides: Sides,
) -> None:
    early, plain = sides["rows by sessions"][0]
    step = ["sizes", "lengths", "ids", "has ids", "pooled", "gradients"]
    assert plain.order[:12] == 2 * step
    # The ids of step 1 travel while step 0 computes: all three exchanges have begun before its
    # gradients leave, and are awaited after its update, when rows are read.
    first = ["sizes", "sizes", "lengths", "ids", "has ids", "pooled", "lengths", "ids", "gradients"]
    then = ["sizes", "has ids", "pooled", "lengths", "ids", "gradients"]
    assert early.order[:21] == [*first, *then, *then]
    assert sorted(early.order[:54]) == sorted(step * 9)
    # What was sent early is counted, and so is what a step waited for.
    for row in early.steps:
        assert 0 < row["ids_waited_s"] <= row["ids_s"]
    assert all(row["input_s"] > 0 for row in plain.steps)


@pytest.mark.parametrize("name", FLAGS)
def test_a_server_scores_as_the_run_does_to_the_bit(sides: Sides, folder: Path, name: str) -> None:
    own = folder / f"{[*FLAGS].index(name)}-True"
    spec, base = read_prepared(own)
    samples = read_samples(spec.data, base)
    ranker = open_ranker(own)
    assert (ranker.name, ranker.step) == ("clicks", STEPS)
    index = np.arange(*samples.bounds("test"))
    jagged, numbers, _ = samples.batch(index)
    logits = ranker.scorer.score(jagged, numbers).double().numpy()
    for early, _ in sides[name]:
        assert np.array_equal(early.logits, logits)
    # A request of three samples, as the file has them.
    file = read_columns(base / spec.data.path)
    rows = {each: file[each][-3:].tolist() for each in ("user", "ad", "words")}
    prices = [float(each) for each in file["price"][-3:]]
    coded = ranker.code({}, {**rows, "price": prices})
    three = ranker.score([coded, coded])
    assert three == [logits[-3:].tolist()] * 2


def test_what_cannot_be_served_is_one_sentence(sides: Sides, folder: Path) -> None:
    assert sides
    files = folder / f"{[*FLAGS].index('files')}-True"
    shards = sorted((files / "tiers").glob("*/*"))
    assert len(shards) > 1
    blocks = shards[0] / "blocks"
    whole_blocks = blocks.read_bytes()
    blocks.write_bytes(bytes(byte ^ 1 for byte in whole_blocks))
    with pytest.raises(CheckpointError) as caught:
        open_ranker(files)
    assert str(caught.value) == (
        f"Block 0 of {blocks} is damaged. Remove the run's newest checkpoint, so that it goes on "
        "from the one before."
    )
    blocks.write_bytes(whole_blocks)
    commit = shards[0] / f"commit-{STEPS:06}.npz"
    own = commit.read_bytes()
    shutil.copy(shards[0] / f"commit-{STEPS - 4:06}.npz", commit)
    with pytest.raises(CheckpointError) as caught:
        open_ranker(files)
    assert str(caught.value) == (
        f"{shards[0]} holds rows of another run than its checkpoint. Restore the checkpoints and "
        "the files of one run, or choose another folder with --out."
    )
    commit.write_bytes(own)
    commit.write_bytes(commit.read_bytes()[:100])
    with pytest.raises(CheckpointError) as caught:
        open_ranker(files)
    assert str(caught.value) == (
        f"{commit} is damaged. Remove the run's newest checkpoint, so that it goes on from the one "
        "before."
    )
    commit.unlink()
    with pytest.raises(CheckpointError) as caught:
        open_ranker(files)
    assert str(caught.value) == (
        f"{shards[0]} has no commit {STEPS}. Choose another folder with --out, or remove this one."
    )
    towers = folder / f"{[*FLAGS].index('towers')}-True"
    with pytest.raises(SpecError) as refused:
        convert_run(towers, folder / "small", 0.1)
    assert str(refused.value) == (
        f"{towers} has tables in towers (model.towers), and their modules have no formats of fewer "
        "bits. Serve it as it is, or train it without towers."
    )
    whole = folder / "0-False"
    (whole / "columns.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        open_ranker(whole)
    assert str(caught.value) == (
        f"{whole / 'columns.json'} cannot be read: it is not what a run writes. Run the same "
        "`equipoise train` again, which writes it."
    )
    (whole / "columns.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_ranker(whole)
    assert str(caught.value) == (
        f"{whole} has no columns.json, which says what row each value is: an earlier version "
        "trained it. Run the same `equipoise train` again; what is trained stays, and the file is "
        "written."
    )
    shutil.rmtree(whole / "checkpoint")
    with pytest.raises(CheckpointError) as caught:
        open_ranker(whole)
    assert str(caught.value) == (
        f"{whole} has no whole checkpoint. Train first: equipoise train run.toml."
    )


def test_inputs_are_made_once_each_in_order_and_two_steps_ahead() -> None:
    made: list[int] = []

    class _Input:
        def __init__(self, step: int) -> None:
            self.step, self.delivery = step, self
            self.advanced = 0

        def advance(self) -> None:
            self.advanced += 1

        def receive(self) -> None:
            self.advanced += 10

    def make(step: int) -> _Input:
        made.append(step)
        return _Input(step)

    ahead = StepsAhead(make)  # type: ignore[arg-type]
    last: _Input | None = None
    for step in range(3, 8):
        taken, spent = ahead.take(step, 8)
        assert taken.step == step  # type: ignore[attr-defined]
        assert taken is last or last is None
        ahead.begin_next(spent)
        ahead.advance()
        ahead.advance()
        last = ahead._next  # type: ignore[assignment]
        assert (last is None) == (step == 7)
        if last is not None:
            assert (last.step, last.advanced) == (step + 1, 3)
        assert max(made) <= min(7, step + 2)
    assert made == [3, 4, 5, 6, 7]
    ahead.stop()
    # Stopped in between, the batch that is under way is received, since its bytes travel already.
    _, spent = ahead.take(0, 9)
    ahead.begin_next(spent)
    under_way = ahead._next
    ahead.stop()
    assert under_way.advanced == 11  # type: ignore[union-attr]
