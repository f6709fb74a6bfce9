"""Build a server's engine around a trained model: pool, scheduler, price.

What it decides
    The cache takes a quarter of the memory that is free, and no more than 16 contexts, unless the
    number of its tokens is given. A context that is longer than the cache is cut to it.

Kept true (tests/unit/serve/test_start.py)
    A server's fingerprint changes with its weights.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from equipoise.base.errors import FitError, SpecError
from equipoise.base.units import format_bytes
from equipoise.checkpoint.manifest import MANIFEST
from equipoise.schedule.batching.fair.table import find_policy
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.engine.pool import KvPool, token_bytes
from equipoise.serve.generate import build_decoder
from equipoise.serve.price import measure_price
from equipoise.serve.prompt import PromptReader
from equipoise.serve.source import TrainedModel

PAGE_TOKENS = 16
_SHARE = 4
"""The cache takes one part of this many of the free memory."""
_MOST_CONTEXTS = 16
_SAMPLED_BYTES = 4096
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that has not started, and what it is made of."""

    engine: EngineLoop
    dtype: str
    device: str
    kv_tokens: int
    fingerprint: str
    """Changes with the weights, the sizes and how they are computed."""


def build_engine(
    trained: TrainedModel,
    *,
    policy: str,
    dtype: str | None = None,
    device: str = "cpu",
    kv_tokens: int | None = None,
    weights: Mapping[str, float] | None = None,
    is_invariant: bool = False,
) -> Built:
    """An engine for a model.

    Args:
        trained: Weights and tokenizer.
        policy: Who is served first.
        dtype: ``fp32`` or ``bf16``; None for that of the weights.
        device: Where to compute.
        kv_tokens: Tokens that the cache holds; None for what fits.
        weights: Shares of tenants.
        is_invariant: Whether answers may not depend on what is computed beside them.

    Raises:
        SpecError: a setting is out of range.
        FitError: the cache does not fit, or holds not even one page.
        ModelError: the model or its tokenizer cannot be served.
    """
    make_policy = find_policy(policy)
    prompts = PromptReader(trained.files, trained.model)
    decoder = build_decoder(trained, None if dtype is None else DTYPES[dtype]).to(device)
    weight = decoder.embed.weight
    size = token_bytes(trained.model, weight.dtype)
    context = trained.context_tokens
    if kv_tokens is None:
        kv_tokens = _free_bytes(weight.device) // _SHARE // size
        kv_tokens = kv_tokens if context is None else min(kv_tokens, _MOST_CONTEXTS * context)
        if kv_tokens < PAGE_TOKENS:
            raise FitError(
                f"A page of {PAGE_TOKENS} tokens needs {format_bytes(PAGE_TOKENS * size)}, and a "
                f"{_SHARE}th of the free memory of {weight.device} is less. Free some, or serve a "
                "smaller model."
            )
    if kv_tokens < PAGE_TOKENS:
        raise SpecError(
            f"--kv-tokens must be at least one page of {PAGE_TOKENS} tokens; it is {kv_tokens}."
        )
    pages = kv_tokens // PAGE_TOKENS
    pool = KvPool(
        trained.model,
        pages=pages,
        page_tokens=PAGE_TOKENS,
        dtype=weight.dtype,
        device=weight.device,
    )
    settings = BatchSettings(pages, page_tokens=PAGE_TOKENS, weights=dict(weights or {}))
    paged = PagedDecoder(decoder, pool, is_invariant=is_invariant)
    engine = EngineLoop(
        paged,
        prompts,
        Scheduler(settings, measure_price(paged), make_policy),
        context_tokens=min(context or pages * PAGE_TOKENS, pages * PAGE_TOKENS),
    )
    name = next(name for name, each in DTYPES.items() if each == weight.dtype)
    return Built(
        engine, name, str(weight.device), pages * PAGE_TOKENS, fingerprint(trained, weight.dtype)
    )


def fingerprint(trained: TrainedModel, dtype: torch.dtype) -> str:
    """A digest that changes with the weights, the sizes and how they are computed.

    Of each weight its first and last 4 KiB are read: training changes all of them.
    """
    digest = hashlib.sha256(repr(trained.model).encode())
    digest.update(f"{dtype} {torch.__version__}".encode())
    for name in sorted(trained.state):
        flat = trained.state[name].detach().reshape(-1)
        for part in (flat[:_SAMPLED_BYTES], flat[-_SAMPLED_BYTES:]):
            digest.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return f"fp_{digest.hexdigest()[:16]}"


def model_name(source: Path) -> str:
    """What clients call a model: the name of its run, folder or file."""
    source = source.resolve()
    if source.is_file():
        return source.stem
    return source.parent.parent.name if (source / MANIFEST).exists() else source.name


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
