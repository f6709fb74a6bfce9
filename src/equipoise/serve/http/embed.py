"""``POST /v1/embeddings``: prompts become directions.

What it decides
    A long list is computed in waves, so that one request never fills the queue, and takes no more
    places than its tenant may have. ``dimensions`` may only be the model's own width: cutting a
    vector is right for models that were trained for it, and nothing in a decoder's files says so.

Kept true (tests/unit/serve/http/test_embeddings.py)
    The vectors are those of each input by itself; base64 holds the same numbers.

Sources
    OpenAI's API reference, "Embeddings": at most 2,048 inputs, none of them empty, vectors of
    length 1.
"""

import base64
import sys
from array import array
from collections.abc import Sequence

from equipoise.serve.engine.request import GenerateRequest, PromptEmbedded
from equipoise.serve.http.answers import Answers
from equipoise.serve.http.asked import Asked, Prompt, read_prompts, require_tokens
from equipoise.serve.http.choice import ChoicePart
from equipoise.serve.http.fault import invalid, too_long
from equipoise.serve.http.fields import EmbeddingsBody
from equipoise.serve.http.served import ServedModel
from equipoise.serve.http.shape import Json

_WAVE = 32
"""Inputs that are computed together."""


async def ask_embeddings(
    model: ServedModel, body: EmbeddingsBody, tenant: str
) -> tuple[Prompt, ...]:
    """The inputs as tokens.

    Raises:
        HttpError: one of them is too long, or has a token that the model does not have; or other
            dimensions are asked for than the model has.
    """
    width, limit = model.width, model.context_tokens
    if body.dimensions not in (None, width):
        raise invalid(
            f"'dimensions' must be {width:,}, the width of {model.name}, or left out: the model "
            "was not trained to have its vectors cut.",
            "dimensions",
        )
    prompts = await read_prompts(model, body.input, tenant, most_tokens=limit, name="input")
    if (longest := max(len(prompt.ids) for prompt in prompts)) > limit:
        raise too_long(limit, longest, "input")
    require_tokens(model, input=max(max(prompt.ids) for prompt in prompts))
    return tuple(prompts)


def waves(prompts: Sequence[Prompt], most: int | None, tenant: str) -> list[Asked]:
    """The inputs in groups that are computed together, at most ``most`` in each."""
    size = min(_WAVE, len(prompts), _WAVE if most is None else most)
    return [
        Asked(
            tuple(group),
            tuple(
                GenerateRequest(prompt.ids, most_tokens=0, embeds=True, tenant=tenant)
                for prompt in group
            ),
            each=1,
            n=1,
            top=None,
        )
        for group in (prompts[at : at + size] for at in range(0, len(prompts), size))
    ]


async def embed(answers: Answers) -> list[tuple[float, ...]]:
    """The vectors of one wave, in order.

    Raises:
        HttpError: one of them failed.
    """
    vectors: list[tuple[float, ...]] = [()] * len(answers.choices)
    async for number, part in answers.parts():
        if isinstance(part, PromptEmbedded):
            vectors[number] = part.vector
        elif isinstance(part, ChoicePart):
            answers.require_whole(number, part)
    return vectors


def embeddings_json(
    model: str, vectors: Sequence[tuple[float, ...]], prompt_tokens: int, *, is_base64: bool
) -> Json:
    """OpenAI's list of embeddings."""
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _in_base64(vector) if is_base64 else vector,
            }
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    }


def _in_base64(vector: tuple[float, ...]) -> str:
    """The numbers as float32, little-endian."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")
