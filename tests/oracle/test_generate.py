"""`equipoise generate` against transformers: the same folder, the same tokens."""

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from equipoise.base.errors import ModelError
from equipoise.cli.main import main
from equipoise.parallel.theirs.cached import CachedTheirs
from equipoise.serve.generate import Generator, generate
from equipoise.serve.sample import Sampling
from equipoise.serve.source import open_model
from support.hf.families import ENGINE_FAMILIES, FAMILIES, save_family
from support.hf.models import build_engine

TEXTS = ["def f(x):", "naïve 你好", " ", "some words " * 20]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("hf") / "llama")


def theirs(oracle: Any, ids: list[int], tokens: int) -> list[int]:
    """Their greedy continuation, by cached decoding."""
    out = oracle.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        do_sample=False,
        temperature=None,
        max_new_tokens=tokens,
        max_length=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", [*FAMILIES, *ENGINE_FAMILIES])
def test_greedy_text_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    folder = save_family(family, tmp_path / family)
    how = {"attn_implementation": "eager"} if family in ENGINE_FAMILIES else {}
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    generator = Generator(open_model(folder))
    ends = 0
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert generator.encode(text) == ids
        answer = generator.generate(text, tokens=24)
        expected = theirs(oracle, ids, 24)
        assert answer.prompt_ids == tuple(ids)
        is_end = expected[-1] in (0, 1)
        ends += is_end
        assert list(answer.ids) == (expected[:-1] if is_end else expected)
        assert answer.stopped == ("end" if is_end else "length")
        whole = tokenizer.decode([*ids, *answer.ids], skip_special_tokens=True)
        assert whole == tokenizer.decode(ids, skip_special_tokens=True) + answer.text
    print(f"{family}: {ends} of {len(TEXTS)} texts ended")


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["generate", *map(str, argv), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    said: dict[str, Any] = json.loads(captured.out)
    return said


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_conversation_is_answered_by_the_chat_template(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = save_family(family, tmp_path / family)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "some words"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    said = answer(capsys, llama, "--chat", "some words", "--system", "be brief", "--tokens", 12)
    assert said["prompt_ids"] == ids
    expected = theirs(oracle, ids, 12)
    assert said["ids"] == [token for token in expected if token not in (0, 1)]
    assert said["text"] == tokenizer.decode(said["ids"], skip_special_tokens=True)
    # In a conversation what was said before is part of the next prompt.
    talk += [{"role": "assistant", "content": said["text"]}, {"role": "user", "content": "more"}]
    monkeypatch.setattr("builtins.input", iter_input(["some words", "", "more"]))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    argv = ["--chat", "--system", "be brief", "--tokens", "12", "--quiet"]
    assert main(["generate", str(llama), *argv]) == 0
    second = Generator(open_model(llama)).generate(talk, tokens=12)
    assert capsys.readouterr().out == f"{said['text']}\n{second.text}\n\n"


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 16,
        "factor": 2.0,
    },
    "windows": {},
}


@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_cached_logits_are_those_of_the_whole_sequence(rope: str) -> None:
    """Also where frequencies of RoPE change on the way, and after a sequence is cut back."""
    if rope == "windows":
        model = build_engine("gemma2", sliding_window=4)
    else:
        model = build_engine("llama", max_position_embeddings=32, rope_parameters=ROPES[rope])
    model.train(False)
    cached, calls = CachedTheirs(model), list[int]()
    model.model.register_forward_pre_hook(
        lambda _, __, given: calls.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    for tokens in ([5, 9, 7], *([each] for each in range(10, 50)), [3, 4]):
        logits_V = cached.extend(tokens)
        held = list(cached.tokens)
        assert_near(logits_V, model(torch.tensor([held])).logits[0, -1])
        assert calls.pop() == len(held)
    restarts = sum(each > 2 for each in calls) - 1  # but for the prompt
    assert restarts == {"dynamic": 12, "longrope": 2, "windows": 0}[rope]
    cached.cut(6)
    assert_near(cached.extend([8]), model(torch.tensor([[*held[:6], 8]])).logits[0, -1])


def assert_near(logits_V: torch.Tensor, right_V: torch.Tensor) -> None:
    assert float((logits_V - right_V).abs().max()) <= 1e-5 * float(right_V.abs().max())


def iter_input(lines: list[str]) -> Any:
    """A person who types these lines and then ends."""
    left = iter(lines)

    def ask(_prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return ask


def test_text_from_stdin_streams_after_its_prompt(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("some words\n"))
    assert main(["generate", str(llama), "--tokens", "9"]) == 0
    captured = capsys.readouterr()
    whole = generate(llama, "some words", tokens=9)
    assert captured == (f"some words{whole.text}\n", "")
    assert main(["generate", str(llama), "some words", "--tokens", "9", "--quiet"]) == 0
    assert capsys.readouterr() == (f"{whole.text}\n", "")


def test_a_prompt_that_is_not_text_is_refused(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert main(["generate", str(llama)]) == 2
    assert capsys.readouterr().err == (
        "The prompt on stdin is not UTF-8 text: byte 0xff. Convert it.\n"
    )


def test_draws_depend_on_the_seed_alone(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["some ", "--tokens", 15, "--top-k", 40, "--temperature", 1.5]
    first = answer(capsys, llama, *flags, "--seed", 1)
    assert answer(capsys, llama, *flags, "--seed", 1)["ids"] == first["ids"]
    assert answer(capsys, llama, *flags, "--seed", 2)["ids"] != first["ids"]
    sampling = Sampling(1.5, top_k=40, seed=1)
    assert list(generate(llama, "some ", tokens=15, sampling=sampling).ids) == first["ids"]


def test_a_text_longer_than_the_trained_window_is_noticed(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "some words " * 30
    tokens = answer(capsys, llama, prompt, "--tokens", 1)["prompt_tokens"]
    assert main(["generate", str(llama), prompt, "--tokens", "100"]) == 0
    assert capsys.readouterr().err == (
        f"Prompt and new tokens may reach {tokens + 100} tokens, and the model was trained with "
        "windows of 128: what comes after may make less sense.\n"
    )


def test_a_long_prompt_shows_how_much_of_it_is_read(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "some words " * 2600
    assert main(["generate", str(llama), prompt, "--tokens", "2"]) == 0
    captured = capsys.readouterr()
    whole = generate(llama, prompt, tokens=2)
    assert captured.out == f"{prompt}{whole.text}\n"
    size = len(whole.prompt_ids)
    assert re.search(rf"\nread {size:,} tokens: done in \S+ m?s\n$", captured.err)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_refused(llama: Path, temperature: float) -> None:
    generator = Generator(open_model(llama))
    with torch.no_grad():
        for weight in generator.trained.state.values():
            weight.fill_(torch.nan)
    with pytest.raises(ModelError) as caught:
        generator.generate("some words", tokens=2, sampling=Sampling(temperature))
    assert str(caught.value) == (
        "The model's largest logit is nan, so no token can be chosen. Check its weights."
    )


def test_a_prompt_of_millions_of_tokens_is_refused(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * 1_100_000))
    assert main(["generate", str(llama), "--tokens", "2"]) == 2
    assert re.fullmatch(
        r"The prompt has 1,\d{3},\d{3} tokens, and at most 1,048,576 are read. Shorten it.\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["x", "--tokens", "0"], "--tokens must be at least 1; it is 0."),
        (["x", "--system", "y"], "--system needs --chat. Give both or neither."),
        (["x", "--top-p", "2"], "top_p must be above 0 and at most 1; it is 2.0."),
        (
            ["x", "--top-k", "3", "--temperature", "0"],
            "--top-k and --top-p limit what is drawn, and --temperature 0 draws nothing. Raise the "
            "temperature, or leave them out.",
        ),
    ],
)
def test_usage(
    llama: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(llama), *argv]) == 2
    assert capsys.readouterr() == ("", f"{words}\n")


def test_what_cannot_generate(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give = "Give a run, a checkpoint, a Hugging Face folder, or a .gguf file."
    assert main(["generate", str(tmp_path / "absent"), "x"]) == 2
    assert capsys.readouterr().err == f"No such file or folder: {tmp_path / 'absent'}. {give}\n"
    assert main(["generate", str(tmp_path), "x"]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path} holds no model: it is not a run (it has no checkpoint/), a checkpoint (no "
        f"manifest.json) or a Hugging Face folder (no config.json). {give}\n"
    )
    bare = Path(shutil.copytree(llama, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    assert main(["generate", str(bare), "x", "--chat"]) == 2
    assert capsys.readouterr().err == (
        f"{bare} has no chat template, so nobody knows how it was taught to talk. Continue plain "
        "text instead, without --chat.\n"
    )
    (bare / "tokenizer.json").unlink()
    assert main(["generate", str(bare), "x"]) == 2
    assert capsys.readouterr().err == (
        f"{bare} has no tokenizer.json, which turns text into tokens. Write the model's there: "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) does.\n"
    )
