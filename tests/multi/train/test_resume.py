"""What a run that goes on says of what has changed, and that it trains each document once."""

import json
from collections import Counter
from pathlib import Path

import pytest

from equipoise.base.errors import CheckpointError, LayoutError
from equipoise.checkpoint.manifest import newest_good
from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.data.cache.store import TokenStore
from equipoise.data.stream import DocumentStream
from equipoise.observe.reader import read_run
from support.make_run import MakeRun
from support.ranks import on_ranks
from support.ranks.on_ranks import Ended
from support.read_run import EXACT, events

DELAYED = {"policy": "delayed", "queues": 3, "max_delay_steps": 3, "lr": 1e-3}


def run(folder: Path, resolved) -> Ended:
    return run_ranks(resolved.ranks, on_ranks.train, folder, resolved, {})[0]


def waiting(folder: Path) -> Counter[tuple[int, ...]]:
    """Pieces that wait in the newest checkpoint."""
    path, _, _ = newest_good(folder / "checkpoint")
    state = json.loads((path / "packer.json").read_text())
    return Counter(
        tuple(row[:3]) for queue in (*state["queues"], state["remained"]) for row in queue
    )


def test_delayed_on_other_ranks_trains_every_document_once(
    tmp_path: Path, make_run: MakeRun, store: TokenStore
) -> None:
    straight = run(tmp_path / "straight", make_run(steps=9, **DELAYED))
    folder = tmp_path / "resumed"
    sessions = [
        run(folder, make_run(steps=steps, dp=dp, **DELAYED))
        for steps, dp in ((3, 2), (6, 1), (9, 3))
    ]
    stream = DocumentStream(store.doc_tokens, seed=0, context_tokens=256)
    given = Counter(
        tuple(piece) for step in range(9) for piece in stream.step(step * 1024, 1024).tolist()
    )
    trained = Counter(piece for session in sessions for piece in session.pieces)
    assert trained + waiting(folder) == given
    assert Counter(straight.pieces) + waiting(tmp_path / "straight") == given
    assert sum(waiting(folder).values()) > 0  # or the queues had nothing to lose
    for session, before, now in ((sessions[1], 2, 1), (sessions[2], 1, 3)):
        (said,) = [line for line in session.said if line.startswith("pack.policy = ")]
        assert said.startswith(
            f'pack.policy = "delayed" packed for {before} data-parallel ranks before and packs '
            f"for {now} now: which documents share a step depends on that number. Each is still "
            "trained once; "
        )
    assert not [line for line in straight.said if line.startswith("pack.policy = ")]


def test_a_queue_that_is_empty_binds_nobody_to_the_policy(tmp_path: Path, make_run) -> None:
    at_once = DELAYED | {"max_delay_steps": 0}
    first = run(tmp_path, make_run(steps=2, **at_once))
    assert not waiting(tmp_path)
    again = run(tmp_path, make_run(steps=4, policy="by-work", lr=1e-3))
    assert (len(first.losses), len(again.losses)) == (2, 2)


def test_a_document_over_the_new_cap_is_refused(tmp_path: Path, make_run) -> None:
    run(tmp_path, make_run(steps=3, **DELAYED))
    longest = max(stop - start for _, start, stop in waiting(tmp_path))
    with pytest.raises(LayoutError) as caught:
        run(tmp_path, make_run(steps=6, context_tokens=128, **DELAYED))
    assert str(caught.value) == (
        f"A document of {longest} tokens waits in the queues of the checkpoint, and a micro-batch "
        f"of this run holds 160. Set pack.max_tokens = {longest}, or train into another folder "
        "with --out."
    )


def test_changed_keys_are_told_with_both_values_and_the_stream_goes_on_where_it_was(
    tmp_path: Path, make_run, store: TokenStore
) -> None:
    first = run(tmp_path, make_run(steps=3, lr=1e-3))
    path, manifest, _ = newest_good(tmp_path / "checkpoint")
    assert manifest.run["pack.context_tokens"] == 256
    assert manifest.run["pack.step_tokens"] == 1024
    changed = make_run(steps=5, lr=1e-3, context_tokens=128, step_tokens=2048, dp=3, zero=3)
    second = run(tmp_path, changed)
    sentence = (
        "run.toml has changed since then: pack.context_tokens = 256 before and 128 now; "
        "pack.step_tokens = 1024 before and 2048 now; train.steps = 3 before and 5 now. The run "
        "goes on as it is now."
    )
    assert second.said[:2] == [f"Resuming after step 3 from {path}.", sentence]
    assert [event["message"] for event in events(tmp_path, "changed")] == [sentence]

    def tokens(pieces) -> Counter[tuple[int, int]]:
        return Counter((doc, at) for doc, start, stop in pieces for at in range(start, stop))

    stream = DocumentStream(store.doc_tokens, seed=0, context_tokens=256)
    given = stream.step(0, 3 * 1024 + 2 * 2048).tolist()
    assert tokens(first.pieces + second.pieces) == tokens(given)


def test_the_same_run_has_nothing_to_tell(tmp_path: Path, make_run) -> None:
    straight = run(tmp_path / "straight", make_run(steps=4, every_steps=2))
    (tmp_path / "cut").mkdir()
    (tmp_path / "straight" / "checkpoint").rename(tmp_path / "cut" / "checkpoint")
    newest = tmp_path / "cut" / "checkpoint" / "step-000004"
    newest.rename(tmp_path / "later")
    again = run(tmp_path / "cut", make_run(steps=4, every_steps=2, dp=1))
    assert again.losses == pytest.approx(straight.losses[2:], rel=EXACT)
    assert [line for line in again.said if "changed" in line] == []


def test_another_seed_is_refused(tmp_path: Path, make_run) -> None:
    run(tmp_path, make_run(steps=2))
    with pytest.raises(CheckpointError, match=r"train\.seed = 0, but this run's is 5: "):
        run(tmp_path, make_run(steps=4, seed=5))


def test_a_clock_that_was_set_back_hides_no_stop_of_a_real_run(
    tmp_path: Path, make_run, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, make_run(steps=2))
    lines = [(tmp_path / "journal" / f"rank-0000{rank}.jsonl") for rank in (0, 1)]
    before = [len(path.read_text().splitlines()) for path in lines]
    run(tmp_path, make_run(steps=4))
    for path, count in zip(lines, before, strict=True):
        written = [json.loads(line) for line in path.read_text().splitlines()]
        for event in written[count:]:
            event["t"] -= 3600
        path.write_text("".join(json.dumps(event) + "\n" for event in written))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["stopped"], facts["steps"], facts["sessions"]) == ("done", 4, 2)
    for spans in read_run(tmp_path).spans:
        forward = spans.name == spans.names.index("forward")
        assert spans.step[forward].tolist() == sorted(spans.step[forward].tolist())
        assert set(spans.step[forward]) == {1, 2, 3, 4}
