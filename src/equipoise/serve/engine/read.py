"""Read what an iteration computed: choose tokens, score and embed prompts, find what went wrong.

What it decides
    Greedy tokens of all rows come from one call; a request with other settings is sampled by
    itself. A row whose logits are not numbers ends its own request.

    A prompt's embedding is the hidden state of its last token after the last norm, scaled to
    length 1: what vLLM (pooling ``LAST``) and sentence-transformers (``lasttoken``, ``Normalize``)
    give for a decoder.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from equipoise.base.errors import EquipoiseError, ModelError
from equipoise.serve.engine.answer import LiveAnswer


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """A row whose logits are read."""

    answer: LiveAnswer
    position: int
    """Where the row's token stands in its sequence; the logits are the next one's."""


def read_logits(logits_RV: Tensor, rows: Sequence[LogitsRow]) -> set[str]:
    """Give each answer its rows, in order; the requests that failed.

    Args:
        logits_RV: Logits [rows, V].
        rows: Whose they are; an answer's rows are neighbours.
    """
    most, best = (x.tolist() for x in logits_RV.float().max(dim=-1))
    failed, begin = set[str](), 0
    for _, group in groupby(rows, key=lambda row: id(row.answer)):
        own = list(group)
        stop = begin + len(own)
        try:
            _give(logits_RV[begin:stop], own, most[begin:stop], best[stop - 1])
        except Exception as error:  # whatever it is, the other requests go on
            own[0].answer.give_up("error", describe_failure(error))
            failed.add(own[0].answer.handle.name)
        begin = stop
    return failed


def _give(logits_RV: Tensor, rows: Sequence[LogitsRow], most: Sequence[float], best: int) -> None:
    """One answer's rows: scores of its prompt, and its next token."""
    answer, last = rows[0].answer, rows[-1].position
    if answer.finish is not None:
        return
    if wrong := [each for each in most if not math.isfinite(each)]:
        raise ModelError(
            f"The model's largest logit is {wrong[0]}, so no token can be chosen. Check its "
            f"weights, or serve it in fp32."
        )
    if answer.request.scores_prompt:
        answer.score_prompt(rows[0].position, logits_RV)
    if answer.finish is None and last == len(answer.tokens) - 1:
        logits_V = logits_RV[-1]
        answer.take(best if answer.takes_likeliest else answer.choose(logits_V), logits_V)


def read_embeddings(x_RD: Tensor, answers: Sequence[LiveAnswer]) -> set[str]:
    """Give each answer its embedding; the requests that failed.

    Args:
        x_RD: Hidden states of their last tokens, after the last norm [rows, D].
        answers: Whose they are.
    """
    unit_RD = torch.nn.functional.normalize(x_RD.float(), dim=-1)
    failed = set[str]()
    for answer, vector in zip(answers, unit_RD.tolist(), strict=True):
        if all(map(math.isfinite, vector)):
            answer.embed(tuple(vector))
        else:
            answer.give_up(
                "error",
                "The model's hidden state is not a number, so there is no embedding. Check its "
                "weights, or serve it in fp32.",
            )
            failed.add(answer.handle.name)
    return failed


def describe_failure(error: Exception) -> str:
    """A sentence for the client; what only our own code understands is named by its kind."""
    if isinstance(error, EquipoiseError):
        return str(error)
    return f"The request failed inside the engine: {type(error).__name__}."
