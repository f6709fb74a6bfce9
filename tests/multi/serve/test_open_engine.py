"""An engine over ranks as the settings ask for it."""

from pathlib import Path

import pytest

from equipoise.base.errors import EquipoiseError, LayoutError, SpecError
from equipoise.nn.hf.files import GENERATION, ModelFiles, as_json, tokenizer_files
from equipoise.serve.engine.build import EngineSettings, open_engine
from equipoise.serve.engine.request import GenerateRequest
from equipoise.serve.source import TrainedModel
from equipoise.spec.device.serving import ServingCurve
from support.serving.engine import END, SMALL, alone, byte_level, small_decoder

CURVE = ServingCurve(((1, 1e-3), (512, 5e-3)), ((1, 1e-4),), 1e-8, 1e-8, 1e-5, 1e-8)


def trained() -> TrainedModel:
    contents = tokenizer_files(byte_level().to_str().encode(), {})
    contents = {**contents, GENERATION: as_json({"eos_token_id": END, "bos_token_id": END})}
    state, files = dict(small_decoder().state_dict()), ModelFiles(contents, "small")
    return TrainedModel(Path("small"), SMALL, state, files, context_tokens=200)


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(**{"cache_tokens": 360, **changes})  # type: ignore[arg-type]


def test_three_ranks_answer_from_a_cache_whose_pages_they_divide() -> None:
    prompt = tuple(range(5, 64))
    with open_engine(trained(), settings(context_ranks=3, iteration_s=1e-6), curve=CURVE) as engine:
        assert (engine.pool.page_tokens, engine.pool.pages) == (18, 20)
        request = GenerateRequest(prompt, most_tokens=7, ignores_end=True)
        handles = [engine.submit(request)]
        handles[0].result()
        handles.append(engine.submit(request))
        assert [list(each.result().ids) for each in handles[1:]] == [alone(prompt, 7)]
        assert handles[1].cached_tokens % 18 == 0 and handles[1].cached_tokens > 0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"context_ranks": 0}, SpecError, "context_ranks is 0. It must be at least 1."),
        (
            {"context_ranks": 2, "is_invariant": True},
            LayoutError,
            "The invariant mode runs in one process: over ranks, the order in which parts of an "
            "attention are summed depends on who has which tokens. Set layout.context to 1.",
        ),
    ],
)
def test_what_cannot_be_served_over_ranks_is_refused(
    changes: dict[str, object], error: type[EquipoiseError], words: str
) -> None:
    with pytest.raises(error) as caught:
        open_engine(trained(), settings(**changes), curve=CURVE)
    assert str(caught.value) == words
