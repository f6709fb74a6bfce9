"""Held-out losses of whole runs: the same on every layout, and training as without them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.base.errors import FaultError
from equipoise.comm.local import run_ranks
from equipoise.data.batch import make_batch
from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.chat.encode import Recipe
from equipoise.data.held_out import cut_documents, draw_documents
from equipoise.data.progress import SilentProgress
from equipoise.data.text.tokenizer import load_tokenizer
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.loss import IGNORED
from equipoise.observe.reader import read_run
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch
from equipoise.spec.run.spec import DataSpec, EvalSpec
from support.chat import template as chatml
from support.make_run import MODEL, MakeRun
from support.ranks import on_ranks
from support.read_run import EXACT, events

WINDOW = 256
ROUNDING = 1e-6
DEEP = ModelSpec(layers=4, hidden=32, heads=2, kv_heads=2, ffn=48, vocab=320, head_width=16)
SPARSE = ModelSpec(
    layers=2,
    hidden=32,
    heads=2,
    kv_heads=2,
    ffn=48,
    vocab=320,
    head_width=16,
    experts=4,
    top_k=2,
    expert_ffn=24,
    capacity_factor=0.5,
)
EVERY = EvalSpec(path="held", every_steps=1)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory, cache: Path, store: TokenStore) -> TokenStore:
    """Nine documents of 2 to some 450 tokens, in the tokens of the corpus."""
    folder = tmp_path_factory.mktemp("held")
    for number, repeats in enumerate((1, 1, 2, 3, 5, 8, 13, 20, 45)):
        text = f"def held_{number}(): return {number}\n" * repeats
        (folder / f"{number:02}.py").write_text(text)
    (folder / "00.py").write_text("x")
    spec = DataSpec(
        source="text", path=str(folder), tokenizer=str(store.tokenizer_file), cache=str(cache)
    )
    return prepare(spec, folder, progress=SilentProgress(), workers=1)


def one_by_one(model: ModelSpec, held: TokenStore, seed: int = 0) -> dict[int, tuple[float, int]]:
    """Loss and labels of the documents of each bucket, each piece by itself, in float64."""
    decoder = Decoder(model).double()
    initialize(decoder, seed)
    for each in decoder.modules():
        if hasattr(each, "capacity_factor"):
            each.capacity_factor = 0.0
    sums: dict[int, tuple[float, int]] = {}
    for document, tokens in enumerate(held.doc_tokens.tolist()):
        bucket = 1 << (tokens.bit_length() - 1)
        for piece in cut_documents(np.array([document]), held.doc_tokens, WINDOW):
            batch = make_batch(held, MicroBatch(piece[None]), torch.device("cpu"))
            with torch.no_grad():
                loss = decoder(batch.tokens_T, batch.doc_tokens, labels_T=batch.labels_T)
            before, labels = sums.get(bucket, (0.0, 0))
            sums[bucket] = before + float(loss), labels + int((batch.labels_T >= 0).sum())
    return sums


def assert_buckets(event: dict, sums: dict[int, tuple[float, int]]) -> None:
    buckets = event["buckets"]
    assert buckets["least_tokens"] == sorted(sums)
    for least, loss, labels in zip(
        buckets["least_tokens"], buckets["loss"], buckets["labels"], strict=True
    ):
        assert labels == sums[least][1]
        assert loss == pytest.approx(sums[least][0] / labels, rel=ROUNDING)
    total, labels = (sum(each) for each in zip(*sums.values(), strict=True))
    assert event["labels"] == labels
    assert event["loss"] == pytest.approx(total / labels, rel=ROUNDING)


TWO_RANKS = {
    **{f"zero {zero}": (MODEL, {"dp": 2, "zero": zero}) for zero in (0, 2, 3)},
    "delayed": (MODEL, {"dp": 2, "policy": "delayed"}),
    "divided": (MODEL, {"dp": 2, "policy": "divided", "zero": 3}),
    "cp": (MODEL, {"dp": 1, "cp": 2, "zero": 3}),
    "ulysses": (DEEP, {"dp": 1, "cp": 2, "strategy": "ulysses"}),
    "tp": (MODEL, {"dp": 1, "tp": 2}),
    "ep": (SPARSE, {"dp": 2, "ep": 2}),
    "experts under zero 3": (SPARSE, {"dp": 2, "zero": 3}),
    **{
        f"pp {stages}": (DEEP, {"dp": 1, "pp": 2, "stages": stages})
        for stages in ("1f1b", "interleaved", "zb-v")
    },
    "divided in time": (DEEP, {"dp": 1, "pp": 2, "policy": "divided-in-time"}),
}


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory, store: TokenStore, held: TokenStore
) -> Path:
    """A step of every layout of two ranks, evaluated before and after: 15 s."""
    root, make = tmp_path_factory.mktemp("two"), MakeRun(store)
    runs = {
        name: make(model=model, held=held, evaluate=EVERY, steps=1, step_tokens=2048, **keys)
        for name, (model, keys) in TWO_RANKS.items()
    }
    run_ranks(2, on_ranks.train_each, root, runs)
    return root


@pytest.mark.parametrize("name", TWO_RANKS)
def test_losses_are_those_of_the_documents_one_by_one(two_ranks, held, name: str) -> None:
    first, *later = events(two_ranks / name, "eval")
    assert [first["step"], *(each["step"] for each in later)] == [0, 1]
    model, _ = TWO_RANKS[name]
    assert_buckets(first, one_by_one(model, held))
    assert first["documents"] == held.documents
    assert first["tokens"] == int(held.doc_tokens.sum())


def test_layouts_agree_after_training(two_ranks, tmp_path, make_run, held) -> None:
    for name, (model, keys) in TWO_RANKS.items():
        if model is not MODEL or "policy" in keys:  # other steps train other pieces
            continue
        losses = [each["loss"] for each in events(two_ranks / name, "eval")]
        plain = [each["loss"] for each in events(two_ranks / "zero 0", "eval")]
        assert losses == pytest.approx(plain, rel=EXACT), name


FOUR_RANKS = {
    "dp cp zero 3": (MODEL, {"dp": 2, "cp": 2, "zero": 3}),
    "pp dp zero 3": (DEEP, {"dp": 2, "pp": 2, "zero": 3}),
    "pp tp zero 2": (DEEP, {"dp": 1, "pp": 2, "tp": 2, "zero": 2}),
    "pp ep": (SPARSE, {"dp": 2, "pp": 2, "ep": 2}),
    "divided tp": (MODEL, {"dp": 2, "tp": 2, "policy": "divided"}),
}


def test_axes_together_give_the_same_losses(tmp_path, make_run, held) -> None:  # 4 ranks: 12 s
    runs = {
        name: make_run(model=model, held=held, evaluate=EVERY, steps=1, step_tokens=2048, **keys)
        for name, (model, keys) in FOUR_RANKS.items()
    }
    run_ranks(4, on_ranks.train_each, tmp_path, runs)
    for name, (model, _) in FOUR_RANKS.items():
        first, last = events(tmp_path / name, "eval")
        assert (first["step"], last["step"]) == (0, 1)
        assert_buckets(first, one_by_one(model, held))


def test_training_is_the_same_to_the_bit_and_so_is_the_loss(tmp_path, make_run, held) -> None:
    layouts = {"zero 3": {"zero": 3}, "ep": {"model": SPARSE, "ep": 2}}
    runs = {}
    for name, keys in layouts.items():
        runs[name] = make_run(steps=2, **keys)
        for turn in ("once", "again"):
            runs[f"{name} {turn}"] = make_run(steps=2, held=held, evaluate=EVERY, **keys)
    ended = run_ranks(2, on_ranks.train_each, tmp_path, runs)[0]
    for name in layouts:
        for turn in ("once", "again"):
            other = ended[f"{name} {turn}"]
            assert other.losses == ended[name].losses
            for weight, values in ended[name].weights.items():
                assert np.array_equal(other.weights[weight], values), weight
        once, again = (
            [(each["loss"], each["buckets"]["loss"]) for each in events(tmp_path / run, "eval")]
            for run in (f"{name} once", f"{name} again")
        )
        assert len(once) == 3
        assert once == again


def test_a_document_for_two_ranks_leaves_one_idle(tmp_path, make_run, held) -> None:
    one = EvalSpec(path="held", every_steps=1, tokens=2)
    layouts = {"zero 3": {"zero": 3}, "divided": {"policy": "divided"}, "cp": {"dp": 1, "cp": 2}}
    runs = {
        name: make_run(steps=1, held=held, evaluate=one, **keys) for name, keys in layouts.items()
    }
    run_ranks(2, on_ranks.train_each, tmp_path, runs)
    (drawn,) = draw_documents(held.doc_tokens, 2).tolist()
    sums = one_by_one(MODEL, held)
    for name in layouts:
        first = events(tmp_path / name, "eval")[0]
        assert first["documents"] == 1
        assert first["tokens"] == int(held.doc_tokens[drawn])
        assert math.isfinite(first["loss"])
        assert first["buckets"]["least_tokens"][0] in sums
    losses = [events(tmp_path / name, "eval")[0]["loss"] for name in layouts]
    assert losses == pytest.approx(losses[:1] * 3, rel=ROUNDING)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, TokenStore]:
    """Seven conversations of two turns, 50 to some 700 tokens, whose answers alone are learned."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = chatml.write_tokenizer(folder / "tokenizer")
    turns = ["user", "assistant", "user", "assistant"]
    rows = [
        {"messages": [{"role": role, "content": f"{role} {n} " * n} for role in turns]}
        for n in (1, 1, 2, 3, 5, 8, 13)
    ]
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = DataSpec(
        source="jsonl",
        path=str(folder / "held.jsonl"),
        format="messages",
        tokenizer=str(tokenizer),
        cache=str(cache),
    )
    return folder, prepare(spec, folder, progress=SilentProgress(), workers=1)


def answers_one_by_one(folder: Path) -> dict[int, tuple[float, int]]:
    """Loss and labels of the answers of each bucket, from the rows themselves, in float64."""
    decoder = Decoder(MODEL).double()
    initialize(decoder, 0)
    encoder = Recipe(folder / "tokenizer", "messages", "answers").load()
    sums: dict[int, tuple[float, int]] = {}
    for line in (folder / "held.jsonl").read_text().splitlines():
        tokens, is_learned, _ = encoder.encode_row(json.loads(line))
        assert is_learned is not None
        labels = np.append(np.where(is_learned, tokens, IGNORED)[1:], IGNORED)
        bucket = 1 << (len(tokens).bit_length() - 1)
        for start in range(0, len(tokens), WINDOW):
            some = slice(start, start + WINDOW)
            with torch.no_grad():
                loss = decoder(
                    torch.from_numpy(tokens[some]),
                    [len(tokens[some])],
                    labels_T=torch.from_numpy(labels[some]),
                )
            before, count = sums.get(bucket, (0.0, 0))
            sums[bucket] = before + float(loss), count + int((labels[some] != IGNORED).sum())
    return sums


def test_of_conversations_the_answers_alone_count(tmp_path, make_run, chats) -> None:
    layouts = {
        "dp": {"dp": 2, "zero": 3},
        "cp": {"dp": 1, "cp": 2},
        "tp": {"dp": 1, "tp": 2},
        "divided": {"dp": 2, "policy": "divided"},
    }
    folder, store = chats
    runs = {
        name: make_run(held=store, evaluate=EVERY, steps=1, step_tokens=2048, **keys)
        for name, keys in layouts.items()
    }
    run_ranks(2, on_ranks.train_each, tmp_path, runs)
    sums = answers_one_by_one(folder)
    for name in layouts:
        first = events(tmp_path / name, "eval")[0]
        assert_buckets(first, sums)
        assert first["tokens"] > 1.5 * first["labels"]


def test_bf16_is_near(tmp_path, make_run, held) -> None:
    runs = {"bf16": make_run(steps=1, held=held, evaluate=EVERY, precision="bf16", zero=3)}
    run_ranks(2, on_ranks.train_each, tmp_path, runs)
    total, labels = (sum(each) for each in zip(*one_by_one(MODEL, held).values(), strict=True))
    assert events(tmp_path / "bf16", "eval")[0]["loss"] == pytest.approx(total / labels, rel=1e-2)


def test_a_resumed_run_evaluates_on_the_same_steps(tmp_path, make_run, held) -> None:
    asked = EvalSpec(path="held", every_steps=2)
    resolved = make_run(steps=6, every_steps=3, held=held, evaluate=asked, zero=2)
    run_ranks(2, on_ranks.train, tmp_path / "whole", resolved, {})
    with pytest.raises(FaultError, match="Rank 1 of 2 failed"):
        once = tmp_path / "cut" / "checkpoint" / "step-000003"
        run_ranks(2, on_ranks.train, tmp_path / "cut", resolved, {"kill_at": 5, "once": once})
    run_ranks(2, on_ranks.train, tmp_path / "cut", resolved, {})
    whole, cut = (read_run(tmp_path / name).evaluations for name in ("whole", "cut"))
    assert whole.step.tolist() == cut.step.tolist() == [0, 2, 4, 6]
    assert whole.loss.tolist() == cut.loss.tolist()
    assert whole.bucket_loss.tolist() == cut.bucket_loss.tolist()
    assert whole.least_tokens.tolist() == sorted(one_by_one(MODEL, held))
    assert (whole.bucket_labels.sum(axis=1) == whole.labels).all()
    assert (whole.eval_s > 0).all()
    assert (whole.predicted_s > 0).all()


def test_the_run_says_what_it_measured(tmp_path, make_run, held) -> None:
    resolved = make_run(steps=1, held=held, evaluate=EVERY, dp=1)
    ended = run_ranks(1, on_ranks.train, tmp_path / "run", resolved, {})[0]
    event = events(tmp_path / "run", "eval")[-1]
    text_bytes, tokenizer = event["text_bytes"], load_tokenizer(held.tokenizer_file)
    assert text_bytes == sum(  # nobody predicts a first token, and the end token is no text
        len(tokenizer.decode(held.read(each, 1, tokens - 1)).encode())
        for each, tokens in enumerate(held.doc_tokens.tolist())
    )
    bits = event["loss"] * event["labels"] / math.log(2) / text_bytes
    assert event["bits_per_byte"] == pytest.approx(bits)
    assert ended.said[-2] == (
        f"Held-out loss {event['loss']:.3f} (step 1): perplexity {math.exp(event['loss']):,.2f}, "
        f"{bits:.3f} bits per byte."
    )
