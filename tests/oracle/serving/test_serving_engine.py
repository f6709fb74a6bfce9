"""The serving engine against transformers: all texts of a batch, the same tokens and logits."""

from pathlib import Path

import pytest
import torch
import transformers

from equipoise.base.errors import FitError, ModelError, SpecError
from equipoise.serve.engine.build import EngineSettings, open_engine
from equipoise.serve.engine.request import GenerateRequest
from equipoise.serve.source import open_model
from equipoise.spec.device.serving import ServingCurve
from support.hf.families import FAMILIES, save_family

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


def test_a_model_of_other_modules_is_refused(tmp_path: Path) -> None:
    folder = save_family("gemma2", tmp_path / "gemma2")
    with pytest.raises(ModelError) as caught:
        open_engine(folder, settings(), curve=CURVE)
    assert str(caught.value) == (
        f"{folder} is computed by the modules of transformers, which keep no pages. Continue "
        f"single texts with equipoise generate."
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
        (
            {"cache_bytes": 100},
            FitError,
            "The cache has 100 B, and one page of 16 tokens needs 6.0 KiB. Give it more memory.",
        ),
    ):
        with pytest.raises(kind) as caught:
            open_engine(folder, settings(**changes), curve=CURVE)
        assert str(caught.value) == words
