"""A server around a tiny random decoder, on a free port, in a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

from equipoise.nn.hf.files import GENERATION, ModelFiles, as_json, tokenizer_files
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.http.app import make_app
from equipoise.serve.http.served import ServedModel
from equipoise.serve.http.server import ServerThread
from equipoise.serve.http.server_state import ServerState
from equipoise.serve.http.tenants import Tenants, open_tenants
from equipoise.serve.prompt import PromptReader
from support.chat.template import CHATML
from support.serving.engine import END, SMALL, byte_level, make_engine

MODEL = "tiny"


class Running:
    """A server that runs, and clients for it."""

    def __init__(self, state: ServerState, thread: ServerThread) -> None:
        self.state, self.thread, self.port = state, thread, thread.port
        self.url = f"http://127.0.0.1:{self.port}"
        self._clients: list[openai.OpenAI] = []

    def client(self, key: str = "none", **settings: Any) -> openai.OpenAI:
        settings = {"max_retries": 0, "timeout": 60, **settings}
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **settings)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for each in self._clients:
            each.close()


def prompt_reader() -> PromptReader:
    settings = {"chat_template": CHATML, "eos_token": "<|end|>"}
    contents = {
        **tokenizer_files(byte_level().to_str().encode(), settings),
        GENERATION: as_json({"eos_token_id": END, "bos_token_id": END}),
    }
    return PromptReader(ModelFiles(contents, "tiny"), SMALL)


def served_model(**settings: Any) -> ServedModel:
    engine: EngineLoop = make_engine(**{"pages": 256, "context_tokens": 512, **settings})
    engine.prompts = prompt_reader()
    return ServedModel(MODEL, engine, SMALL.vocab, "fp_tiny")


@contextmanager
def running(
    tenants: Tenants | None = None, *, state: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Running]:
    model = served_model(**settings)
    shared = ServerState(model, tenants or open_tenants(), **(state or {}))
    with model.engine, ServerThread(make_app(shared), shared) as thread:
        server = Running(shared, thread)
        yield server
        server.close()
