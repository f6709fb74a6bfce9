"""An engine around a small decoder with a byte-level tokenizer, and answers without an engine."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from equipoise.nn.cached import CachedDecoder
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.files import GENERATION, ModelFiles, as_json, tokenizer_files
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.prompt import PromptReader
from equipoise.serve.sample import Sampling, choose_token
from equipoise.spec.model.presets import ModelSpec
from support.serving.loop import LinearPrice
from support.serving.paged import PLAIN, built, paged

END = 0
SMALL = dataclasses.replace(PLAIN, vocab=280)


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    """280 tokens: one that ends texts, all bytes, and some words."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["Hello world", "a world of words, hello"] * 9, trainer)
    return core


def reader(model: ModelSpec) -> PromptReader:
    contents = tokenizer_files(byte_level().to_str().encode(), {})
    contents = {**contents, GENERATION: as_json({"eos_token_id": END, "bos_token_id": END})}
    return PromptReader(ModelFiles(contents, "small"), model)


@functools.cache
def small_decoder(model: ModelSpec = SMALL, dtype: torch.dtype = torch.float32) -> Decoder:
    return built(model, dtype)


def make_engine(
    model: ModelSpec = SMALL,
    *,
    decoder: Decoder | None = None,
    dtype: torch.dtype = torch.float32,
    pages: int = 64,
    page_tokens: int = 4,
    policy: str = "fifo",
    context_tokens: int = 200,
    is_invariant: bool = False,
    price: LinearPrice | None = None,
    **limits: Any,
) -> EngineLoop:
    decoder = decoder or small_decoder(model, dtype)
    settings = BatchSettings(pages, page_tokens=page_tokens, **limits)
    sizes = {"pages": pages, "page_tokens": page_tokens, "swap_pages": settings.swap_pages}
    return EngineLoop(
        paged(decoder, **sizes, is_invariant=is_invariant),
        reader(model),
        Scheduler(settings, price or LinearPrice(), FAIR_POLICIES[policy]),
        context_tokens=context_tokens,
    )


def alone(
    prompt: Sequence[int],
    tokens: int,
    *,
    decoder: Decoder | None = None,
    sampling: Sampling | None = None,
    end: int | None = None,
) -> list[int]:
    """The answer to one prompt by itself, from another implementation: an end token is its last."""
    cached, ids = CachedDecoder(decoder or small_decoder()), list[int]()
    logits_V = cached.extend(list(prompt))
    while len(ids) < tokens:
        ids.append(choose_token(logits_V, sampling or Sampling(), len(prompt) + len(ids)))
        if ids[-1] == end:
            break
        logits_V = cached.extend(ids[-1:])
    return ids
