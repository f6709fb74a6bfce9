"""The serving engine against transformers: all texts of a batch, the same tokens and logits."""

import dataclasses
import json
from pathlib import Path

import gguf
import pytest
import tokenizers
import torch
import transformers
from transformers.convert_slow_tokenizer import generate_merges

from equipoise.base.errors import FitError, ModelError, SpecError
from equipoise.nn.hf.gguf import gguf_tokenizer
from equipoise.nn.hf.read import weight_shapes
from equipoise.serve.engine.build import EngineSettings, open_engine
from equipoise.serve.engine.request import GenerateRequest
from equipoise.serve.source import open_model
from equipoise.spec.device.serving import ServingCurve
from support.hf.families import FAMILIES, save_family
from support.hf.gguf import MODEL, copy_to_gguf, write_gguf

TEXTS = ["def f(x):", "naïve 你好", " ", "some words " * 20, "some words " * 20 + "again"]
CURVE = ServingCurve(((1, 1e-3), (512, 5e-3)), ((1, 1e-4),), 1e-8, 1e-8, 1e-5, 1e-8)


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(**{"cache_bytes": 1 << 22, "context_tokens": 128, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_answered_as_transformers_answers_each_text(tmp_path: Path, family: str) -> None:
    folder = save_family(family, tmp_path / family)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder)
    # A budget of one page cuts every prompt into chunks; the last text shares pages.
    with open_engine(folder, settings(iteration_s=1e-6), curve=CURVE) as engine:
        ids = [engine.prompts.encode(text) for text in TEXTS]
        handles = [
            engine.submit(GenerateRequest(tuple(each), most_tokens=24, top=4, scores_prompt=scored))
            for each in ids
            for scored in (False, True)
        ]
        embedded = [
            engine.submit(GenerateRequest(tuple(each), most_tokens=0, embeds=True)) for each in ids
        ]
        answers = [handle.result() for handle in handles]
        vectors = [torch.tensor(handle.result().embedding) for handle in embedded]
    for prompt, answer, scored in zip(ids, answers[::2], answers[1::2], strict=True):
        assert answer.ids == scored.ids
        text = torch.tensor([[*prompt, *answer.ids]])
        with torch.no_grad():
            wanted = torch.log_softmax(oracle(text).logits[0].float(), dim=-1)
        assert list(answer.ids) == wanted[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert len(answer.ids) == 24 or answer.ids[-1] in (0, 1)
        given = [*scored.prompt_scores, *scored.scores]
        assert [each.token for each in given] == text[0, 1:].tolist()
        for at, score in enumerate(given):
            assert score.logprob == pytest.approx(float(wanted[at, score.token]), abs=2e-4)
            assert score.top[0][1] == pytest.approx(float(wanted[at].max()), abs=2e-4)
    # An embedding is the last hidden state.
    for prompt, vector in zip(ids, vectors, strict=True):
        with torch.no_grad():
            last = oracle.base_model(torch.tensor([prompt])).last_hidden_state[0, -1].float()
        assert (vector - last / last.norm()).abs().max() < 1e-5


def test_bf16_answers_are_near_those_of_transformers(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path / "llama")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    prompt = tuple(range(3, 40))
    with open_engine(folder, settings(dtype="bf16"), curve=CURVE) as engine:
        request = GenerateRequest(prompt, most_tokens=0, scores_prompt=True)
        scores = engine.submit(request).result().prompt_scores
    with torch.no_grad():
        wanted = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0].float(), dim=-1)
    errors = [
        abs(score.logprob - float(wanted[at, score.token])) for at, score in enumerate(scores)
    ]
    assert len(errors) == len(prompt) - 1 and max(errors) <= 0.15


@pytest.mark.parametrize(
    ("family", "changed"), [("mistral", {}), ("qwen2", {"max_window_layers": 1})]
)
def test_a_model_with_sliding_windows_answers_within_them(
    tmp_path: Path, family: str, changed: dict[str, int]
) -> None:
    """The oracle has its windows, and would read less of a longer text."""
    folder = save_family(
        family, tmp_path / family, sliding_window=48, use_sliding_window=True, **changed
    )
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder)
    types = getattr(oracle.config, "layer_types", None) or ["sliding_attention"]
    assert "sliding_attention" in types
    prompt = tuple(range(3, 40))
    with open_engine(folder, settings(context_tokens=None), curve=CURVE) as engine:
        assert engine.context_tokens == 48
        request = GenerateRequest(prompt, most_tokens=11, scores_prompt=True)
        answer = engine.submit(request).result()
        with pytest.raises(SpecError) as caught:
            engine.submit(GenerateRequest(prompt, most_tokens=12))
    assert "exceeds the model's context of 48 tokens" in str(caught.value)
    with torch.no_grad():
        wanted = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0].float(), dim=-1)
    for at, score in enumerate(answer.prompt_scores):
        assert score.logprob == pytest.approx(float(wanted[at, score.token]), abs=2e-4)
    (remark,) = open_model(folder, within_window=True).remarks
    assert remark == (
        f"The layers of {folder} have sliding windows of 48 tokens, so prompt and answer together "
        "may have 48: within them every layer reads all."
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_answered_as_transformers_answers_its_folder(
    tmp_path: Path, family: str
) -> None:
    folder = save_family(family, tmp_path / family)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    file = copy_to_gguf(oracle, core, tmp_path / "model.gguf")
    pieces = json.loads(core.to_str())["model"]
    theirs = transformers.Qwen2Tokenizer(
        vocab=pieces["vocab"], merges=[tuple(each) for each in pieces["merges"]]
    )
    texts = [*TEXTS, "it's 3.14159\t e\u0301 you'LL\r\n\n  x"]
    with open_engine(file, settings(), curve=CURVE) as engine:
        assert engine.prompts.end_ids == {0}
        prompts = [engine.prompts.encode(text) for text in texts]
        assert prompts == [theirs(text).input_ids for text in texts]
        handles = [
            engine.submit(GenerateRequest(tuple(each), most_tokens=0, scores_prompt=True))
            for each in prompts
            if len(each) > 1
        ]
        answers = [handle.result().prompt_scores for handle in handles]
    for prompt, scores in zip((each for each in prompts if len(each) > 1), answers, strict=True):
        with torch.no_grad():
            wanted = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0].float(), dim=-1)
        for at, score in enumerate(scores):
            assert score.logprob == pytest.approx(float(wanted[at, score.token]), abs=2e-4)


def test_pieces_of_a_gguf_file_are_those_of_transformers(tmp_path: Path) -> None:
    """As SentencePiece's files of Llama 2 and Mistral have them: scores, and no merges."""
    letters = [*"▁abcdehilnorstwxy.,é"]
    words = ["▁a", "he", "▁t", "▁the", "in", "re", "on", "▁in", "the", "ing", "▁w", "▁▁", "▁▁▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256)), *words, *letters]
    scores = [0.0] * 259 + [-float(at) for at in range(len(words) + len(letters))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    vocab = {token: at for at, token in enumerate(tokens)}
    special = tokens[:3] + tokens[3:259]
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)), special)
    theirs = transformers.LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)

    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_token_scores(scores)
        writer.add_bos_token_id(1)
        writer.add_unk_token_id(0)

    model = dataclasses.replace(MODEL, vocab=len(tokens))
    state = {name: torch.zeros(shape) for name, shape in weight_shapes(model).items()}
    file = write_gguf(
        tmp_path / "a.gguf", state, model=model, tokenizer="llama", split="default", tokens=tokens,
        merges=(), kinds=kinds, end=2, change=describe,
    )  # fmt: skip
    core = gguf_tokenizer(file)
    for text in ("the rain in", "in  the    wind", "on\n", "你好 é🙂", "</s>", ""):
        ids = core.encode(text).ids
        assert ids == theirs(text).input_ids
        assert core.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    # The blank before a text is another one than its own, and comes behind special tokens, too:
    # so llama.cpp and the models' own tokenizer.json have it, and transformers 5 has not.
    assert core.encode(" in").tokens == ["<s>", "▁", "▁in"]
    assert core.encode("a</s>the").tokens == ["<s>", "▁a", "</s>", "▁the"]


def test_a_model_of_other_modules_is_refused_with_what_asks_for_them(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    folder = save_family("llama", tmp_path / "llama", rope_parameters=rope)
    with pytest.raises(ModelError) as caught:
        open_engine(folder, settings(), curve=CURVE)
    assert str(caught.value) == (
        f"{folder} is computed by the modules of transformers, which keep no pages. config.json: "
        f'rope_parameters of type "linear" is not supported; only "default" or "llama3" is. '
        f"Continue single texts with equipoise generate."
    )


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path / "llama")
    for changes, kind, words in (
        (
            {"context_tokens": 1 << 30},
            SpecError,
            "context_tokens must be from 1 to 128, the model's own; it is 1,073,741,824.",
        ),
        ({"page_tokens": 0}, SpecError, "page_tokens is 0. It must be at least 1."),
        ({"dtype": "fp16"}, SpecError, 'dtype must be "fp32" or "bf16"; it is "fp16".'),
        (
            {"cache_bytes": 100},
            FitError,
            "The cache has 100 B, and one page of 16 tokens needs 6.0 KiB. Give it more memory.",
        ),
    ):
        with pytest.raises(kind) as caught:
            open_engine(folder, settings(**changes), curve=CURVE)
        assert str(caught.value) == words
