"""Every endpoint behind the gate: read a body, ask the engine, write an answer.

Kept true (tests/unit/serve/http/test_completions.py, test_chat.py, with OpenAI's own client)
    Streamed or not, an answer's text, scores and usage are the same.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Send

from equipoise import __version__
from equipoise.base.shown import shorten
from equipoise.serve.engine.request import PromptScored
from equipoise.serve.http.answers import Answers, SlowReaderError
from equipoise.serve.http.asked import (
    Asked,
    ask_chat,
    ask_completion,
    render,
    require_tokens,
    tokenize,
)
from equipoise.serve.http.body import read_body
from equipoise.serve.http.choice import ChoicePart
from equipoise.serve.http.embed import ask_embeddings, embed, embeddings_json, waves
from equipoise.serve.http.fault import HttpError, invalid, overloaded
from equipoise.serve.http.fields import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    StreamOptions,
    TokenizeBody,
)
from equipoise.serve.http.limits import TenantLimits
from equipoise.serve.http.send import (
    ClientGoneError,
    beside,
    drop,
    encode,
    encode_long,
    send_bytes,
    send_events,
    send_json,
    while_connected,
)
from equipoise.serve.http.server_state import ServerState
from equipoise.serve.http.shape import AnswerHead, ChatShape, CompletionShape, Json, Shape, usage

_MOST_DETOKENIZED = 1_000_000


class KnownModel(Protocol):
    """What every server knows of its model."""

    @property
    def name(self) -> str:
        """As requests name it."""

    @property
    def created(self) -> int:
        """When it was made, in seconds since 1970."""


class AboutModel:
    """What any server answers about itself and its model, whatever the model is for."""

    def __init__(self, model: KnownModel, write_metrics: Callable[[], bytes]) -> None:
        """Speak of a model; ``write_metrics`` writes the server's as Prometheus reads them."""
        self._named, self._write_metrics = model, write_metrics

    async def models(self, request: Request, send: Send) -> None:  # noqa: ARG002
        """``GET /v1/models``."""
        await send_json(send, {"object": "list", "data": [self._card()]})

    async def model_card(self, request: Request, send: Send) -> None:
        """``GET /v1/models/{id}``."""
        self._require_model(request.path_params["name"])
        await send_json(send, self._card())

    async def version(self, request: Request, send: Send) -> None:  # noqa: ARG002
        """``GET /version``."""
        await send_json(send, {"version": __version__})

    async def metrics(self, request: Request, send: Send) -> None:  # noqa: ARG002
        """``GET /metrics``."""
        text = self._write_metrics()
        await send_bytes(send, text, "text/plain; version=0.0.4; charset=utf-8")

    def _require_model(self, name: str) -> None:
        if name != self._named.name:
            raise HttpError(
                404,
                f"There is no model '{shorten(name, 100)}'. This server has '{self._named.name}'.",
                param="model",
                code="model_not_found",
            )

    def _card(self) -> Json:
        return {
            "id": self._named.name,
            "object": "model",
            "created": self._named.created,
            "owned_by": "equipoise",
            **self._own_facts(),
        }

    def _own_facts(self) -> Json:
        """What this kind of model says of itself besides."""
        return {}


class Endpoints(AboutModel):
    """What a server of texts answers."""

    def __init__(self, state: ServerState) -> None:
        super().__init__(state.model, state.metrics.write)
        self.state = state
        self.model = state.model

    # Text.

    async def completions(self, request: Request, send: Send) -> None:
        """``POST /v1/completions``."""
        body = await self._read(request, CompletionBody)
        await while_connected(request.receive, self._complete(request, send, body))

    async def _complete(self, request: Request, send: Send, body: CompletionBody) -> None:
        asked = await ask_completion(self.model, body, self._tenant(request))
        shape = CompletionShape(self._head(), asked, self.model.vocabulary)
        await self._answer(request, send, body, asked, shape)

    async def chat(self, request: Request, send: Send) -> None:
        """``POST /v1/chat/completions``."""
        body = await self._read(request, ChatBody)
        await while_connected(request.receive, self._chat(request, send, body))

    async def _chat(self, request: Request, send: Send, body: ChatBody) -> None:
        asked = await ask_chat(self.model, body, self._tenant(request))
        shape = ChatShape(self._head(), asked, self.model.vocabulary)
        await self._answer(request, send, body, asked, shape)

    async def embeddings(self, request: Request, send: Send) -> None:
        """``POST /v1/embeddings``."""
        body = await self._read(request, EmbeddingsBody)
        await while_connected(request.receive, self._embed(request, send, body))

    async def _embed(self, request: Request, send: Send, body: EmbeddingsBody) -> None:
        tenant = self._tenant(request)
        prompts = await ask_embeddings(self.model, body, tenant)
        limits = self.state.limits[tenant]
        groups = waves(prompts, limits.most_answers, tenant)
        count = len(groups[0].requests)
        prompt_tokens = sum(each.prompt_tokens for each in groups)
        self._let_in(limits, partial(limits.take, prompt_tokens, count))
        until_s, vectors = request.scope["state"]["until_s"], list[tuple[float, ...]]()
        try:
            for group in groups:
                answers = Answers(self.model, group, self.state.metrics, until_s=until_s)
                self._count_prompts(group, tenant)
                try:
                    vectors += await embed(answers)
                finally:
                    answers.close(is_answered=True)
        except HttpError as fault:
            if not vectors:
                limits.give_back(prompt_tokens, 0)
            fault.headers = {**limits.headers(), **fault.headers}
            raise
        finally:
            limits.end(count)

        def write() -> bytes:
            is_base64 = body.encoding_format == "base64"
            name = self.model.name
            return encode_long(embeddings_json(name, vectors, prompt_tokens, is_base64=is_base64))

        data = await beside(write, len(vectors) * self.model.width)
        await send_bytes(send, data, "application/json", headers=limits.headers())

    async def _answer(
        self,
        request: Request,
        send: Send,
        body: CompletionBody | ChatBody,
        asked: Asked,
        shape: Shape,
    ) -> None:
        tenant = self._tenant(request)
        limits = self.state.limits[tenant]
        count = len(asked.requests)
        self._let_in(limits, partial(limits.take, asked.prompt_tokens, count))
        try:
            answers = Answers(
                self.model,
                asked,
                self.state.metrics,
                on_token=partial(self.state.use, limits),
                on_slow=lambda: self._give_up(request),
                most_events=self.state.most_events,
                until_s=request.scope["state"]["until_s"],
            )
        except HttpError as fault:
            limits.give_back(asked.prompt_tokens, count)
            fault.headers |= limits.headers()
            raise
        self._count_prompts(asked, tenant)
        is_answered = False
        try:
            if body.stream:
                options = body.stream_options or StreamOptions()
                events = _events(answers, asked, shape, options)
                is_answered = await send_events(
                    send, events, headers=limits.headers(), heartbeat_s=self.state.heartbeat_s
                )
            else:
                await _collect(answers, shape)
                data = await _write_whole(answers, asked, shape)
                await send_bytes(send, data, "application/json", headers=limits.headers())
                is_answered = True
        except SlowReaderError:
            raise ClientGoneError from None
        except HttpError as fault:
            fault.headers = {**limits.headers(), **fault.headers}
            raise
        finally:
            answers.close(is_answered=is_answered)
            limits.end(count)

    def _give_up(self, request: Request) -> None:
        name = request.scope["state"]["name"]
        waited = f"More than {self.state.most_events:,} events waited for its client."
        self.state.log(f"Gave up {name}. {waited}")
        drop(request)

    # Tokens.

    async def tokenize(self, request: Request, send: Send) -> None:
        """``POST /tokenize``: tokens of a text or of a conversation."""
        body = await self._read(request, TokenizeBody)
        await while_connected(request.receive, self._tokenize(send, body, self._tenant(request)))

    async def _tokenize(self, send: Send, body: TokenizeBody, tenant: str) -> None:
        if body.messages is not None:
            prompt = await render(self.model, body.messages, tenant)
        else:
            text, special = body.prompt or "", body.add_special_tokens
            prompt = await tokenize(self.model, text, tenant, special=special)

        def write() -> bytes:
            name = self.model.vocabulary.name
            return encode_long(
                {
                    "count": len(prompt.ids),
                    "max_model_len": self.model.context_tokens,
                    "tokens": [*prompt.ids],
                    "token_strs": [*map(name, prompt.ids)] if body.return_token_strs else None,
                }
            )

        await send_bytes(send, await beside(write, len(prompt.ids)), "application/json")

    async def detokenize(self, request: Request, send: Send) -> None:
        """``POST /detokenize``: the text of tokens."""
        body = await self._read(request, DetokenizeBody)
        if len(body.tokens) > _MOST_DETOKENIZED:
            raise invalid(f"'tokens' must have at most {_MOST_DETOKENIZED:,} entries.", "tokens")
        require_tokens(self.model, tokens=max(body.tokens, default=0))
        core = self.model.tokenizer.core

        def write() -> bytes:
            # A batch of one: only for batches other threads go on meanwhile.
            (text,) = core.decode_batch([body.tokens], skip_special_tokens=False)
            return encode({"prompt": text})

        await send_bytes(send, await beside(write, len(body.tokens)), "application/json")

    async def health(self, _: Request, send: Send) -> None:
        """``GET /health``: whether this server answers: not if it drains or a rank is missing."""
        if self.state.is_draining:
            raise overloaded("The server is shutting down.", 1.0)
        self._require_engine()
        await send_json(send, {"status": "ok"})

    def _let_in(self, limits: TenantLimits, take: Callable[[], None]) -> None:
        """Let a request in, if the tenant's limits do.

        Raises:
            HttpError: the engine or a rank is gone, or the tenant has used what it may.
        """
        try:
            self._require_engine()
            take()
        except HttpError as fault:
            self.state.metrics.count_refusal("engine" if fault.status == 503 else "rate_limit")
            fault.headers = {**limits.headers(), **fault.headers}
            raise

    def _count_prompts(self, asked: Asked, tenant: str) -> None:
        for prompt in asked.prompts:
            self.state.metrics.count_prompt(tenant, len(prompt.ids))

    async def _read(self, request: Request, kind: Any) -> Any:
        tenant, held = self._tenant(request), request.scope["state"]["held"]
        limits = self.state.limits[tenant]

        def hold(size: int) -> None:
            self.state.share.read(tenant, size)
            self._let_in(limits, partial(limits.hold, size, held))

        has_answers = kind not in (TokenizeBody, DetokenizeBody)
        require = limits.require_turn if has_answers else limits.require_request
        admit = partial(self._let_in, limits, require)
        spent = partial(self.state.share.spent_beside, tenant)
        body = await read_body(request, kind, self.state.most_body_bytes, hold, admit, spent)
        if body.model is not None:
            self._require_model(body.model)
        if not has_answers:
            self._let_in(limits, limits.count_request)
        return body

    def _require_engine(self) -> None:
        if not self.model.engine.is_alive:
            raise overloaded("The engine has stopped. Start the server again.", 5.0)
        if (missing := self.model.engine.missing) is not None:
            raise overloaded(str(missing), missing.retry_after_s)

    def _tenant(self, request: Request) -> str:
        return str(request.scope["state"]["tenant"])

    def _head(self) -> AnswerHead:
        return AnswerHead(self.model.name, self.model.fingerprint)

    def _own_facts(self) -> Json:
        return {"max_model_len": self.model.context_tokens}


async def _collect(answers: Answers, shape: Shape) -> None:
    """Wait for all answers.

    Raises:
        HttpError: one failed.
    """
    async for number, part in answers.parts():
        if isinstance(part, PromptScored):
            shape.scored(number, part)
        elif isinstance(part, ChoicePart):
            answers.require_whole(number, part)
            shape.chunk(number, part)


async def _write_whole(answers: Answers, asked: Asked, shape: Shape) -> bytes:
    """All answers as JSON; beside the others' if they are long."""

    def write() -> bytes:
        whole = shape.envelope(shape.whole(answers.best), is_chunk=False)
        return encode_long({**whole, "usage": _usage(answers)})

    tokens = asked.echoed_tokens * len(asked.requests) + answers.answer_tokens
    return await beside(write, 0 if asked.top is None else tokens)


async def _events(
    answers: Answers, asked: Asked, shape: Shape, options: StreamOptions
) -> AsyncIterator[bytes]:
    """Chunks of all answers as they come, each as JSON."""

    def chunk(choices: list[Json]) -> Json:
        envelope = shape.envelope(choices, is_chunk=True)
        if not options.include_usage:
            return envelope
        return {**envelope, "usage": _usage(answers) if options.continuous_usage_stats else None}

    def write(find: Callable[[], list[Json]]) -> bytes:
        choices = find()
        return encode_long(chunk(choices)) if choices else b""

    has_begun = set[int]()
    async for number, part in answers.parts():
        if isinstance(part, PromptScored):
            for late in shape.scored(number, part):
                yield await beside(partial(write, partial(shape.begun, late)), asked.echoed_tokens)
        elif isinstance(part, ChoicePart):
            answers.require_whole(number, part)
            # With the first token and not before: clients time the first chunk.
            if number not in has_begun and (choices := shape.begin(number)):
                yield encode(chunk(choices))
            echoed = 0 if number in has_begun else asked.echoed_tokens
            has_begun.add(number)
            if data := await beside(partial(write, partial(shape.chunk, number, part)), echoed):
                yield data
    if options.include_usage:
        yield encode({**shape.envelope([], is_chunk=True), "usage": _usage(answers)})


def _usage(answers: Answers) -> Json:
    return usage(answers.prompt_tokens, answers.answer_tokens, answers.cached_tokens)
