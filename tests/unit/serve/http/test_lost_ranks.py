"""Ranks that are lost are the server's fault, not the request's: ask again."""

import json
from collections.abc import Sequence

import torch

from equipoise.schedule.batching.iteration import ServeChunk
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.request import RanksLostError
from support.serving.http.raw import ask
from support.serving.http.served import MODEL, running


class _LostOnce(PagedDecoder):
    """Ranks that are gone at the first iteration, and there at the next."""

    is_lost = True

    def run(self, chunks: Sequence[ServeChunk], tokens: Sequence[int]) -> torch.Tensor:
        if self.is_lost:
            self.is_lost = False
            raise RanksLostError("Rank 1 of 2 was lost: SIGKILL ended it. Ask again.", 4.2)
        return super().run(chunks, tokens)


def test_lost_ranks_are_a_503_that_says_when_to_ask_again() -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    data = json.dumps(body).encode()
    with running() as server:
        engine = server.state.model.engine
        whole = engine._decoder
        engine._decoder = _LostOnce(whole.decoder, whole.pool)
        lost, again = (ask(server.port, "POST", "/v1/completions", data) for _ in range(2))
    assert (lost.status, again.status) == (503, 200)
    assert (lost.headers["retry-after"], lost.headers["retry-after-ms"]) == ("5", "4200")
    assert json.loads(lost.body)["error"] == {
        "message": "Rank 1 of 2 was lost: SIGKILL ended it. Ask again.",
        "type": "overloaded_error",
        "param": None,
        "code": "overloaded",
    }
