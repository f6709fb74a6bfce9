"""Whole runs on ranks: every layout the same, every end in a sentence, every resume exact."""

import dataclasses
import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from equipoise.balance.packing.pack import pack_step, rank_seconds, turns_seconds
from equipoise.base.errors import (
    CheckpointError,
    DataError,
    EquipoiseError,
    FaultError,
    LayoutError,
)
from equipoise.checkpoint.index import name_tensors, parse_index
from equipoise.checkpoint.manifest import (
    FORMAT,
    newest_good,
    read_manifest,
)
from equipoise.comm.local import run_ranks
from equipoise.cost.curve import LoadCurve
from equipoise.dash.summary import summarize
from equipoise.data.cache.meta import describe, read_meta, render
from equipoise.data.cache.store import TokenStore, open_store
from equipoise.data.cache.verified import CHUNK_BYTES, ChunkTable
from equipoise.data.stream import DocumentStream
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.write import write_hf
from equipoise.observe.reader import read_run
from support.checkpoints.sealed import write_manifest
from support.make_run import MODEL, MakeRun
from support.ranks import on_ranks
from support.ranks.on_ranks import Ended
from support.read_run import EXACT, assert_close, events


def run(folder: Path, resolved, **script) -> Ended:
    """A run on its own number of ranks; how it ended on rank 0."""
    return run_ranks(resolved.ranks, on_ranks.train, folder, resolved, script)[0]


def fault_of(kind: type[EquipoiseError], folder: Path, resolved, **script) -> str:
    with pytest.raises(kind) as caught:
        run(folder, resolved, **script)
    return str(caught.value)


# Every layout. -------------------------------------------------------------------------------

LAYOUTS = {
    1: {"one zero 0 in-order": (0, "in-order"), "one zero 3 by-work": (3, "by-work")},
    2: {
        "two zero 0 by-work": (0, "by-work"),
        "two zero 1 in-order": (1, "in-order"),
        "two zero 2 by-tokens": (2, "by-tokens"),
        "two zero 3 by-work": (3, "by-work"),
    },
    3: {
        "three zero 1 by-work": (1, "by-work"),
        "three zero 3 in-order": (3, "in-order"),
    },
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> dict:
    """Five steps of AdamW in every layout, on the same pieces: the run, its folder."""
    root, make = tmp_path_factory.mktemp("layouts"), MakeRun(store)
    found = {}
    for dp, rows in LAYOUTS.items():
        runs = {
            name: make(dp=dp, zero=zero, policy=policy, cut="windows", lr=1e-3)
            for name, (zero, policy) in rows.items()
        }
        for name, ended in run_ranks(dp, on_ranks.train_each, root, runs)[0].items():
            found[name] = (ended, root / name)
    return found


@pytest.mark.parametrize("name", [name for rows in LAYOUTS.values() for name in rows])
def test_five_steps_of_adamw_are_the_same_in_every_layout(layouts, name: str) -> None:
    expected, plain_folder = layouts["one zero 0 in-order"]
    found, folder = layouts[name]
    assert len(found.losses) == 5
    assert found.losses[-1] < found.losses[0]
    assert_close(found, expected)
    norms, plain_norms = (
        [event["grad_norm"] for event in events(each, "step")] for each in (folder, plain_folder)
    )
    assert norms == pytest.approx(plain_norms, rel=EXACT)
    assert max(norms) > 1.0  # so that the clip has something to do


@pytest.mark.parametrize("name", ["two zero 1 in-order", "two zero 3 by-work"])
def test_waiting_is_what_its_spans_say(layouts, name: str) -> None:
    folder = layouts[name][1]
    for rank in range(2):
        spans = defaultdict[int, float](float)
        for each in events(folder, "wait", rank):
            spans[each["step"]] += each["duration_s"]
        steps = events(folder, "step", rank)
        waits = [spans[each["step"]] for each in steps]
        assert [each["wait_s"] for each in steps] == pytest.approx(waits)
        assert all(each["wait_s"] <= each["step_s"] for each in steps)
    record = read_run(folder)
    mean = record.wait_s.mean(axis=1) / record.step_s
    assert summarize(record, name).wait_share == pytest.approx(mean[1:].mean())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_turns_are_even_where_ranks_meet_in_each(tmp_path, store, make_run, zero: int) -> None:
    resolved = make_run(zero=zero, steps=3, step_tokens=2048)
    run(tmp_path / "run", resolved)
    packs = events(tmp_path / "run", "pack")
    assert len(packs) == 3
    stream = DocumentStream(store.doc_tokens, seed=0, context_tokens=256)
    curve = LoadCurve(**events(tmp_path / "run", "start")[0]["curve"])
    for step, event in enumerate(packs):
        pieces = stream.step(2048 * step, 2048)
        packed = pack_step(pieces, resolved.spec.pack, 2, curve, meets_each_turn=zero > 1)
        turns_s, ranks_s = turns_seconds(packed, curve), rank_seconds(packed, curve)
        assert event["digest"] == packed.digest
        assert event["turn_skew"] == pytest.approx(turns_s / (sum(ranks_s) / 2))
        assert event["skew"] <= event["turn_skew"] + 1e-9
        assert event["longest_s"] == pytest.approx(turns_s if zero > 1 else max(ranks_s))


def test_clip_is_the_same_on_every_mesh() -> None:
    worlds = [run_ranks(world, on_ranks.clip_made_up, MODEL, [0, 1, 2, 3]) for world in (1, 2, 3)]
    rows = [row for ranks in worlds for stages in ranks for row in stages]
    before, after, gradients = rows[0]
    assert before > 10
    assert after == pytest.approx(1.0, rel=1e-5)
    for other_before, other_after, other in rows[1:]:
        assert other_before == pytest.approx(before, rel=1e-6)
        assert other_after == pytest.approx(after, rel=1e-6)
        for name, gradient in gradients.items():
            assert np.abs(other[name] - gradient).max() <= 1e-6 * np.abs(gradient).max()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_number_of_micro_batches_changes_nothing(tmp_path, store, zero: int) -> None:
    ranks = run_ranks(
        2,
        on_ranks.step_with_micro_batches,
        tmp_path,
        str(store.folder),
        MODEL,
        [1, 2, 5, 14],  # 24 documents on two ranks: of 14, some are empty
        zero,
    )
    (loss, norm, weights), *others = ranks[0]
    for other_loss, other_norm, other in others:
        assert other_loss == pytest.approx(loss, rel=EXACT)
        assert other_norm == pytest.approx(norm, rel=EXACT)
        for name, array in weights.items():
            assert np.abs(other[name] - array).max() <= EXACT * np.abs(array).max()


def test_bf16_is_near_fp32_and_keeps_its_weights_in_fp32(tmp_path, make_run) -> None:
    wide, narrow = (make_run(precision=each, lr=1e-2) for each in ("fp32", "bf16"))
    runs = run_ranks(2, on_ranks.train_each, tmp_path, {"wide": wide, "narrow": narrow})[0]
    assert runs["narrow"].dtypes == {"torch.float32"}
    assert runs["narrow"].losses == pytest.approx(runs["wide"].losses, rel=2e-2)
    assert runs["narrow"].losses != runs["wide"].losses


def test_ranks_that_pack_differently_are_stopped(tmp_path, store) -> None:
    with pytest.raises(LayoutError) as caught:
        run_ranks(3, on_ranks.pack_differently, tmp_path, str(store.folder), MODEL)
    assert re.fullmatch(
        "Rank 2 packed step 7 otherwise than rank 0: data-parallel rank 0 has micro-batches of "
        "\\d+ tokens by rank 0 and of \\d+ tokens by rank 2. Nothing was sent or changed by it. "
        "Give every machine the same version of equipoise and of NumPy.",
        str(caught.value),
    )


# Stopping and going on. -----------------------------------------------------------------------


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path, make_run) -> None:
    resolved = make_run(steps=8, lr=1e-2)
    straight = run(tmp_path / "straight", resolved)
    first = run(tmp_path / "cut", resolved, stop_at=3)
    assert first.reason == "interrupted"
    assert len(first.losses) == 4  # asked after step 3, known to all ranks in step 4
    path, manifest, _ = newest_good(tmp_path / "cut" / "checkpoint")
    assert (manifest.step, manifest.position_tokens, manifest.world) == (4, 4096, 2)
    second = run(tmp_path / "cut", make_run(steps=8, lr=1e-2, dp=3, zero=3))
    assert second.said[0] == f"Resuming after step 4 from {path}."
    assert second.reason == "done"
    joined = dataclasses.replace(second, losses=first.losses + second.losses)
    assert_close(joined, straight)


def test_a_finished_run_has_nothing_left_to_do(tmp_path, make_run) -> None:
    run(tmp_path, make_run(steps=2))
    again = run(tmp_path, make_run(steps=2))
    assert (again.reason, again.losses) == ("done", [])
    assert again.said == [f"Resuming after step 2 from {tmp_path}/checkpoint/step-000002."]


def test_changed_settings_of_the_optimizer_are_not_lost_in_a_resume(tmp_path, make_run) -> None:
    run(tmp_path, make_run(steps=2))
    assert run(tmp_path, make_run(steps=3, weight_decay=0.4)).decay == [0.4, 0.0]


def test_a_run_resumed_while_outliers_wait_is_the_run_that_would_have_been(
    tmp_path, make_run
) -> None:
    delayed = {"policy": "delayed", "queues": 4, "max_delay_steps": 3, "lr": 1e-3}
    straight = run(tmp_path / "straight", make_run(steps=6, **delayed))
    folder = tmp_path / "halved"
    first = run(folder, make_run(steps=3, **delayed))
    waiting = json.loads((folder / "checkpoint" / "step-000003" / "packer.json").read_text())
    assert waiting["waiting"] > 0
    second = run(folder, make_run(steps=6, **delayed))
    assert first.losses + second.losses == pytest.approx(straight.losses, rel=EXACT)
    digests = [
        [event["digest"] for event in events(each, "pack")]
        for each in (folder, tmp_path / "straight")
    ]
    assert digests[0] == digests[1]


def test_documents_that_wait_are_not_lost_to_another_policy(tmp_path, make_run) -> None:
    run(tmp_path, make_run(steps=3, policy="delayed", queues=4, max_delay_steps=3))
    checkpoint = tmp_path / "checkpoint" / "step-000003"
    count = json.loads((checkpoint / "packer.json").read_text())["waiting"]
    assert fault_of(CheckpointError, tmp_path, make_run(steps=4, policy="by-work")) == (
        f'{checkpoint} was packed by "delayed" and {count} documents still wait in its queues; '
        f'"by-work" would lose them. Set pack.policy = "delayed", or train into another folder '
        f"with --out."
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> Path:
    """The folder of a run of four steps, saved at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder, MakeRun(store)(steps=4, every_steps=2))
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_a_torn_newest_checkpoint_is_passed_over_with_a_sentence(copy, make_run) -> None:
    shard = copy / "checkpoint" / "step-000004" / "shard-00001.bin"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    ended = run(copy, make_run(steps=5))
    lost = name_tensors(parse_index(shard.parent), shard.name, size - 1, size)
    assert lost.startswith("optimizer.state.") and " more" not in lost
    what = f"{shard.name} has {size - 1:,} bytes, the manifest says {size:,}; it lacks {lost}."
    sentence = f"{shard.parent} is torn: {what}"
    assert ended.said[:2] == [
        f"{sentence} Passed over.",
        f"Resuming after step 2 from {copy}/checkpoint/step-000002.",
    ]
    assert len(ended.losses) == 3
    faults = events(copy, "torn-checkpoint")
    assert [event["message"] for event in faults] == [sentence]


def test_no_checkpoint_is_whole(copy, make_run) -> None:
    for folder in (copy / "checkpoint").iterdir():
        (folder / "manifest.json").unlink()
    root = copy / "checkpoint"
    assert fault_of(CheckpointError, copy, make_run()) == (
        f"None of the 2 checkpoints in {root} is whole. {root}/step-000004 is torn: its "
        f"manifest.json cannot be read. Restore a copy, or delete {root} to start from the first "
        "step."
    )


def test_a_checkpoint_of_another_model(copy, make_run) -> None:
    other = dataclasses.replace(MODEL, ffn=64)
    assert fault_of(CheckpointError, copy, make_run(model=other)) == (
        f"{copy}/checkpoint/step-000004 holds another model: ffn 48 (this run: 64). Give run.toml "
        "the sizes of the checkpoint, or train into another folder with --out."
    )


def test_a_checkpoint_under_the_name_of_another_step(copy, make_run) -> None:
    root = copy / "checkpoint"
    shutil.copytree(root / "step-000002", root / "step-000999")
    ended = run(copy, make_run(steps=5))
    assert ended.said[:2] == [
        f"{root}/step-000999 holds the checkpoint of step 2 by its manifest.json, whose folder is "
        "named step-000002. Rename it, or delete it if it is a copy. Passed over.",
        f"Resuming after step 4 from {root}/step-000004.",
    ]
    assert len(ended.losses) == 1
    names = sorted(path.name for path in root.iterdir())
    assert names == ["step-000004", "step-000005", "step-000999"]


def test_other_tokens_are_refused_wherever_their_cache_came_from(
    copy, make_run, store, tmp_path
) -> None:
    """A cache that is sound in itself, and of other tokens; the digests of both are named."""
    folder = Path(shutil.copytree(store.folder, tmp_path / "cache" / store.folder.name))
    tokens = store.tokens[:][::-1].tobytes()
    table = ChunkTable()
    table.update(tokens)
    (folder / "tokens.bin").write_bytes(tokens)
    (folder / "tokens.digests").write_bytes(table.finish())
    meta = dataclasses.replace(read_meta(folder), files=describe(folder))
    (folder / "meta.json").write_text(render(meta))
    other = dataclasses.replace(make_run(steps=5), corpus=str(folder))
    known = open_store(folder).digest
    assert known != store.digest
    assert fault_of(CheckpointError, copy, other) == (
        f"{copy}/checkpoint/step-000004 was trained on another corpus or tokenizer (digest "
        f"{store.digest[:8]}; this run's is {known[:8]}). Restore the [data] of that run, or "
        "train into another folder with --out."
    )


def test_a_cache_that_is_damaged_under_a_run_ends_it_in_a_sentence(
    make_run, store, tmp_path
) -> None:
    folder = Path(shutil.copytree(store.folder, tmp_path / "cache" / store.folder.name))
    whole = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    damaged = dataclasses.replace(make_run(steps=50), corpus=str(folder))
    end = min(len(whole), CHUNK_BYTES)
    assert fault_of(DataError, tmp_path / "run", damaged) == (
        f"{folder}/tokens.bin is damaged: bytes 0 to {end:,} are not as they were written. Delete "
        f"the folder {folder}; the next run makes it again."
    )


@pytest.fixture
def first(copy: Path, make_run: MakeRun, store: TokenStore) -> Path:
    """The same run as a version of the first format left it."""
    root = copy / "checkpoint"
    shutil.rmtree(root)
    run_ranks(2, on_ranks.train_first, copy, make_run(steps=2))
    return copy


def test_a_run_of_the_first_format_goes_on(first, tmp_path, make_run) -> None:
    assert (first / "checkpoint" / "step-000002" / ".metadata").exists()
    ended = run(first, make_run(steps=4, dp=1))
    assert ended.said[0] == f"Resuming after step 2 from {first}/checkpoint/step-000002."
    straight = run(tmp_path / "straight", make_run(steps=4))
    assert_close(ended, dataclasses.replace(straight, losses=straight.losses[2:]))


def test_a_checkpoint_of_another_order(copy, make_run) -> None:
    assert "train.seed = 0, but this run's is 5: " in fault_of(
        CheckpointError, copy, make_run(seed=5)
    )


def test_a_checkpoint_of_a_newer_version(copy, make_run) -> None:
    newest = copy / "checkpoint" / "step-000004"
    manifest = read_manifest(newest)
    write_manifest(newest, dataclasses.replace(manifest, format=FORMAT + 1, version="7.0.0"))
    assert fault_of(CheckpointError, copy, make_run()) == (
        f"{newest} has checkpoint format {FORMAT + 1}, written by equipoise 7.0.0; this version "
        f"reads up to {FORMAT}. Upgrade equipoise."
    )


# Faults. -----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_stops_before_any_weight_is_spoiled(
    copy, make_run, store
) -> None:
    unwatched = make_run(steps=9, step_tokens=3072, fingerprint_steps=0)
    message = fault_of(FaultError, copy, unwatched, spoil_at=5)
    # The rank that answers first has closed its journal; the other is ended where it stands.
    found = [*events(copy, rank=0), *events(copy, rank=1)]
    fault, *_ = [event for event in found if event["name"] == "nan-loss"]
    documents = fault["documents"]
    assert documents == sorted(documents)
    assert len(documents) > 8
    named = ", ".join(f"{each} ({store.name(each)})" for each in documents[:8])
    assert message == (
        "The loss of step 6 is not a number; documents of the micro-batches where it is: "
        f"{named} and {len(documents) - 8} more. No weight was changed; the last good checkpoint "
        f"is {copy}/checkpoint/step-000004. The first layer whose output is not finite is norm. "
        "Lower train.lr, or look at those documents."
    )
    assert FaultError.exit_code == 6
    assert run(copy, make_run(steps=6)).said[0] == (
        f"Resuming after step 4 from {copy}/checkpoint/step-000004."
    )


def test_a_gradient_that_is_not_a_number_before_any_checkpoint(tmp_path, make_run) -> None:
    assert fault_of(FaultError, tmp_path, make_run(steps=9, lr=1e30, warmup_steps=0)) == (
        "The gradient norm of step 2 is not a number, though the loss of every micro-batch is. No "
        "weight was changed; no checkpoint yet. The last weight whose gradient is not finite is "
        "layers.0.attention_norm.weight. Lower train.lr."
    )


def test_ranks_without_a_document_in_a_step_are_idle(tmp_path, make_run) -> None:
    """A first step of so few is refused by ``require_step``; a later one does not end the run."""
    few = {"steps": 3, "step_tokens": 8, "lr": 1e-3, "eps": 1e-4}
    alone = run(tmp_path / "alone", make_run(dp=1, **few))
    three = {f"zero {zero}": make_run(dp=3, zero=zero, **few) for zero in (1, 3)}
    for name, ended in run_ranks(3, on_ranks.train_each, tmp_path, three)[0].items():
        assert_close(ended, alone)
        packs = events(tmp_path / name, "pack")
        assert len(packs) == 3 and all(0 in each["rank_tokens"] for each in packs)


def check_refused_save(folder: Path, make_run: MakeRun, reason: str, **script) -> None:
    root = folder / "checkpoint"
    resolved = make_run(steps=6, every_steps=2, lr=1e-2)
    ended = run(folder, resolved, **script)
    assert ended.reason == "done"
    (refused,) = [line for line in ended.said if "could not be written" in line]
    assert refused.startswith(f"The checkpoint of step 4 could not be written to {root} (")
    assert reason in refused
    assert refused.endswith(
        " free). Checkpoints kept: step-000002. Free some space, or lower checkpoint.keep. "
        "The run goes on."
    )
    assert [path.name for path in sorted(root.iterdir())] == ["step-000002", "step-000006"]
    shutil.rmtree(root / "step-000006")
    assert run(folder, resolved).losses == pytest.approx(ended.losses[2:], rel=EXACT)


def test_a_save_that_one_rank_cannot_write_costs_that_save_alone(tmp_path, make_run) -> None:
    once = tmp_path / "checkpoint" / "step-000002"
    check_refused_save(tmp_path, make_run, "File too large; it needs ", file_limit_at=3, once=once)


def test_a_document_that_comes_again_in_a_step_is_divided_by_itself(
    tmp_path: Path, store: TokenStore, make_run
) -> None:
    tokens = int(store.doc_tokens.sum())
    same = {"steps": 2, "cut": "windows", "step_tokens": 2 * tokens + 100, "max_tokens": 4 * tokens}
    alone = run(tmp_path / "alone", make_run(dp=1, policy="by-work", **same))
    two = {policy: make_run(dp=2, policy=policy, **same) for policy in ("divided", "gangs")}
    for ended in run_ranks(2, on_ranks.train_each, tmp_path, two)[0].values():
        assert_close(ended, alone)


# Weights that others made. ------------------------------------------------------------------------


def test_fine_tuning_starts_from_the_weights_of_a_folder(tmp_path, make_run) -> None:
    decoder = Decoder(MODEL)
    initialize(decoder, 99)
    write_hf(tmp_path / "hf", MODEL, decoder.state_dict())
    resolved = make_run(steps=2, init_folder=str(tmp_path / "hf"), lr=1e-20, weight_decay=0.0)
    ended = run(tmp_path / "run", resolved)
    for name, weights in decoder.state_dict().items():
        assert np.abs(ended.weights[name] - weights.numpy()).max() < 1e-9, name
