"""An engine over ranks as the settings ask for it."""

import dataclasses

import pytest

from equipoise.base.errors import EquipoiseError, SpecError
from equipoise.serve.engine.build import EngineSettings, open_engine
from equipoise.serve.engine.request import GenerateRequest
from support.serving.engine import alone
from support.serving.trained import CURVE, trained


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(**{"cache_tokens": 360, **changes})  # type: ignore[arg-type]


def test_three_ranks_answer_from_a_cache_whose_pages_they_divide() -> None:
    prompt = tuple(range(5, 64))
    curve = dataclasses.replace(CURVE, tokens=((1, 1e-3), (512, 2.0)))  # so there are chunks
    with open_engine(trained(), settings(context_ranks=3, iteration_s=1e-6), curve=curve) as engine:
        assert (engine.pool.page_tokens, engine.pool.pages) == (18, 20)
        request = GenerateRequest(prompt, most_tokens=7, ignores_end=True)
        handles = [engine.submit(request)]
        handles[0].result()
        handles.append(engine.submit(request))
        assert [list(each.result().ids) for each in handles[1:]] == [alone(prompt, 7)]
        assert handles[1].cached_tokens % 18 == 0 and handles[1].cached_tokens > 0


def test_the_invariant_mode_over_two_ranks_finds_whole_pages_of_a_prefix() -> None:
    request = GenerateRequest(tuple(range(5, 64)), most_tokens=7, ignores_end=True, top=0)
    answers = []
    for ranks in (1, 2):
        chosen = settings(context_ranks=ranks, is_invariant=True)
        with open_engine(trained(), chosen, curve=CURVE) as engine:
            handles = [engine.submit(request)]
            answers.append(handles[0].result())
            handles.append(engine.submit(request))
            answers.append(handles[1].result())
            assert handles[1].cached_tokens == 48
    assert len(set(answers)) == 1


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"context_ranks": 0}, SpecError, "context_ranks is 0. It must be at least 1."),
    ],
)
def test_what_cannot_be_served_over_ranks_is_refused(
    changes: dict[str, object], error: type[EquipoiseError], words: str
) -> None:
    with pytest.raises(error) as caught:
        open_engine(trained(), settings(**changes), curve=CURVE)
    assert str(caught.value) == words
