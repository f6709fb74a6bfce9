"""A body becomes requests to the engine: one for each answer.

What it decides
    Answers of one prompt differ by their seed; the first has the one that was given. Without a
    seed each is drawn anew. The first one scores the prompt for all of them.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from equipoise.base.errors import DataError, EquipoiseError, ModelError
from equipoise.serve.engine.request import GenerateRequest
from equipoise.serve.http.fault import HttpError, invalid, too_long
from equipoise.serve.http.fields import (
    MOST_SEQUENCES,
    Body,
    ChatBody,
    ChatMessage,
    CompletionBody,
    Prompts,
)
from equipoise.serve.http.served import ServedModel
from equipoise.serve.sample import Sampling

_COMPLETION_TOKENS = 16
"""Most tokens of a completion that does not give their number, as OpenAI has it."""
_SHORT = 4_096
"""Characters that are tokenized at once; longer texts must not hold others up."""
_LONG = 1 << 16
"""Characters of a text that is tokenized while no other such text is: each takes a core for up to
seconds, and the engine needs the cores."""
_SEEDS = 2**63
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as tokens."""

    ids: tuple[int, ...]
    text: str | None
    """The text that was given, if it was text."""
    offsets: tuple[int, ...] | None = None
    """Where each token begins in that text [characters]."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one body asks for."""

    prompts: tuple[Prompt, ...]
    requests: tuple[GenerateRequest, ...]
    """``each`` answers of every prompt, one prompt after another."""
    each: int
    n: int
    """Answers of a prompt that are sent."""
    top: int | None
    """Alternatives of each token that are sent; None for no log-probabilities."""
    echo: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def echoed_tokens(self) -> int:
        """Most tokens of a prompt that an answer begins with, with their scores."""
        if not self.echo or self.top is None:
            return 0
        return max(len(prompt.ids) for prompt in self.prompts)


async def tokenize(
    model: ServedModel,
    text: str,
    tenant: str,
    *,
    special: bool = True,
    most_tokens: int | None = None,
    name: str = "prompt",
) -> Prompt:
    """Tokens of a text.

    Args:
        model: Its tokenizer.
        text: What to cut.
        tenant: Whose it is.
        special: Whether to add what the tokenizer's own rules add.
        most_tokens: Tokens of more are not listed; None lists all.
        name: The field that the text is from.

    Raises:
        HttpError: there are more than ``most_tokens``; says how many.
    """

    def encode() -> Prompt:
        return _encode(model, text, special=special, most_tokens=most_tokens, name=name)

    return encode() if len(text) <= _SHORT else await _aside(model, tenant, len(text), encode)


async def read_prompts(
    model: ServedModel, given: Prompts, tenant: str, *, most_tokens: int, name: str
) -> list[Prompt]:
    """Texts and token ids as prompts, none of them empty.

    Args:
        model: Its tokenizer.
        given: What a body has.
        tenant: Whose they are.
        most_tokens: Of each.
        name: The field that they are from.

    Raises:
        HttpError: a text has more tokens; says how many.
    """
    for each in given:
        if isinstance(each, str):
            _require_short(model, each, most_tokens, name)

    def encode() -> list[Prompt]:
        return [
            _encode(model, each, special=True, most_tokens=most_tokens, name=name)
            if isinstance(each, str)
            else Prompt(each, None)
            for each in given
        ]

    characters = sum(len(each) for each in given if isinstance(each, str))
    prompts = encode() if characters <= _SHORT else await _aside(model, tenant, characters, encode)
    return [_begun(model, prompt) for prompt in prompts]


def _encode(
    model: ServedModel, text: str, *, special: bool, most_tokens: int | None, name: str
) -> Prompt:
    # A batch of one: only for batches other threads go on meanwhile.
    (encoding,) = model.tokenizer.core.encode_batch([text], add_special_tokens=special)
    if most_tokens is not None and len(encoding) > most_tokens:
        raise too_long(most_tokens, len(encoding), name)
    return Prompt(tuple(encoding.ids), text, tuple(first for first, _ in encoding.offsets))


def _require_short(model: ServedModel, text: str, most_tokens: int, name: str) -> None:
    """Refuse, before it is cut, a very long text whose size says that it has too many tokens.

    Raises:
        HttpError: says how many it has at least.
    """
    longest = model.vocabulary.longest_bytes
    least = 0 if longest is None or len(text) <= _LONG else -(-len(text) // longest)
    if least > most_tokens:
        raise too_long(most_tokens, least, name, is_least=True)


def _begun(model: ServedModel, prompt: Prompt) -> Prompt:
    """The prompt, with what begins a text where it has no token."""
    if prompt.ids:
        return prompt
    first = model.first_ids
    return Prompt(first, prompt.text, (0,) * len(first))


async def _aside(
    model: ServedModel, tenant: str, characters: int, work: Callable[[], _Made]
) -> _Made:
    """Do work on another thread, of each tenant a bounded number at a time.

    Very long texts of all of them are cut one at a time. Both hold for clients that go away, too.
    """
    with ExitStack() as held:
        for each in (model.texts[tenant], *([model.long_texts] if characters > _LONG else [])):
            await each.acquire()
            held.callback(each.release)
        running = asyncio.ensure_future(asyncio.to_thread(work))
        release = held.pop_all().close

        def end(task: "asyncio.Future[_Made]") -> None:
            release()
            if not task.cancelled():
                task.exception()  # its client may have left, and nobody else hears it

        running.add_done_callback(end)
        return await asyncio.shield(running)


async def render(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    tenant: str,
    *,
    most_tokens: int | None = None,
) -> Prompt:
    """Tokens of a conversation, by the model's chat template; None takes any number of them.

    Raises:
        HttpError: there is no template, or it refuses the conversation; or the conversation is so
            long that it has more tokens for certain.
    """

    def encode() -> Prompt:
        def check(text: str) -> None:
            if most_tokens is not None:
                _require_short(model, text, most_tokens, "messages")

        return Prompt(tuple(model.tokenizer.encode_chat(talk, check)), None)

    talk = [each.model_dump(exclude_none=True) for each in messages]
    for each in talk:
        # OpenAI's newer name of the same turn.
        if each["role"] == "developer" and not model.tokenizer.knows_role("developer"):
            each["role"] = "system"
    characters = sum(len(each.content) for each in messages)
    try:
        return await _aside(model, tenant, characters, encode)
    except (ModelError, DataError) as error:
        raise invalid(str(error), "messages") from None


async def ask_completion(model: ServedModel, body: CompletionBody, tenant: str) -> Asked:
    """What a completion asks for.

    Raises:
        HttpError: it cannot be answered.
    """
    n = body.n or 1
    each, count = body.best_of or n, len(body.prompt)
    if count * each > MOST_SEQUENCES:
        raise invalid(
            f"{count:,} prompts with {each:,} answers each are {count * each:,} answers. One "
            f"request may have at most {MOST_SEQUENCES}.",
            "n",
        )
    limit = model.context_tokens
    prompts = await read_prompts(model, body.prompt, tenant, most_tokens=limit, name="prompt")
    return _ask(
        model,
        body,
        tuple(prompts),
        field="prompt",
        tenant=tenant,
        most_tokens=body.max_tokens,
        most_name="max_tokens",
        unsaid=_COMPLETION_TOKENS,
        top=body.logprobs,
        n=n,
        each=each,
        echo=bool(body.echo),
    )


async def ask_chat(model: ServedModel, body: ChatBody, tenant: str) -> Asked:
    """What a conversation asks for.

    Raises:
        HttpError: it cannot be answered.
    """
    is_old = body.max_completion_tokens is None
    limit = model.context_tokens
    prompt = await render(model, body.messages, tenant, most_tokens=limit)
    return _ask(
        model,
        body,
        (_begun(model, prompt),),
        field="messages",
        tenant=tenant,
        most_tokens=body.max_tokens if is_old else body.max_completion_tokens,
        most_name="max_tokens" if is_old else "max_completion_tokens",
        top=(body.top_logprobs or 0) if body.logprobs else None,
        n=body.n or 1,
        each=body.n or 1,
        echo=False,
    )


def _ask(
    model: ServedModel,
    body: Body,
    prompts: tuple[Prompt, ...],
    *,
    field: str,
    tenant: str,
    most_tokens: int | None,
    most_name: str,
    unsaid: int | None = None,
    top: int | None,
    n: int,
    each: int,
    echo: bool,
) -> Asked:
    require_tokens(
        model,
        logit_bias=max(body.logit_bias, default=0),
        stop_token_ids=max(body.stop_token_ids or (0,)),
        **{field: max((max(prompt.ids) for prompt in prompts), default=0)},
    )
    requests = []
    for prompt in prompts:
        most = _require_room(model, len(prompt.ids), field, most_tokens, most_name)
        if most_tokens is None and unsaid is not None:
            most = min(most, unsaid)
        if not most and each > 1:
            raise invalid("max_tokens is 0, so n and best_of must be 1.", "n")
        if (body.min_tokens or 0) > most:
            raise invalid(
                f"min_tokens is {body.min_tokens:,}, and the answer may have {most:,}.",
                "min_tokens",
            )
        requests += [
            GenerateRequest(
                prompt=prompt.ids,
                sampling=_sampling(body, number),
                most_tokens=most,
                least_tokens=body.min_tokens or 0,
                stop=body.stop,
                stop_ids=frozenset(body.stop_token_ids or ()),
                ignores_end=bool(body.ignore_eos),
                top=0 if top is None and each > n else top,
                scores_prompt=echo and number == 0 and (top is not None or not most),
                tenant=tenant,
                salt=body.cache_salt or "",
            )
            for number in range(each)
        ]
    return Asked(prompts, tuple(requests), each, n, top, echo)


def _sampling(body: Body, number: int) -> Sampling:
    seed = secrets.randbelow(_SEEDS) if body.seed is None else body.seed % _SEEDS
    if body.seed is not None and number:
        digest = hashlib.blake2b(f"{body.seed} {number}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest) % _SEEDS
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias,
        seed=seed,
    )


def require_tokens(model: ServedModel, **largest_of: int) -> None:
    """Refuse token ids that the model does not have.

    Args:
        model: Its vocabulary.
        largest_of: The largest token id of each field.

    Raises:
        HttpError: one of them is too large.
    """
    for name, largest in largest_of.items():
        if largest >= model.vocab:
            raise invalid(
                f"'{name}' has token {largest:,}, and the model's tokens are 0 to "
                f"{model.vocab - 1:,}.",
                name,
            )


def _require_room(
    model: ServedModel, prompt_tokens: int, field: str, most_tokens: int | None, name: str
) -> int:
    """Tokens that an answer may have.

    Raises:
        HttpError: prompt and answer exceed the model's context.
    """
    limit = model.context_tokens
    asked = prompt_tokens + (1 if most_tokens is None else most_tokens)
    if asked > limit:
        raise too_long(limit, prompt_tokens, field, most_tokens, name)
    return limit - prompt_tokens if most_tokens is None else most_tokens


def refusal(error: EquipoiseError) -> HttpError:
    """What the engine refuses as a 400."""
    return invalid(str(error))
