"""An engine around a trained model: its decoder, its pool, its price and its scheduler.

What it decides
    How many pages the pool has, where the settings do not say it: enough for all sequences at
    their longest, but at most a quarter of the memory that is free.
"""

import contextlib
import dataclasses
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from equipoise.base.errors import FitError, ModelError, SpecError
from equipoise.base.shown import shown
from equipoise.base.units import format_bytes
from equipoise.cost.serving import CurvePrice, PacedPrice
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.files import CONFIG
from equipoise.observe.journal import EventSink
from equipoise.observe.machine import available_bytes
from equipoise.schedule.batching.fair.table import DEFAULT_POLICY, find_policy
from equipoise.schedule.batching.fair.watch import watch
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings, paced, page_tokens_of
from equipoise.serve.calibration import LATER, IdleCalibration, Phases
from equipoise.serve.engine.ahead import compile_ahead
from equipoise.serve.engine.calibrate import DTYPES, estimate_curve, find_curve, kept_curve
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.fused import FusedDecoder, Packs, ServedDecoder
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.engine.pool import PoolSizes, token_bytes
from equipoise.serve.engine.threads import SharedCores
from equipoise.serve.generate import build_decoder
from equipoise.serve.longctx.decoder import ContextDecoder
from equipoise.serve.nano.measure import find_nano, open_nano
from equipoise.serve.nano.report import NanoReport, nano_file
from equipoise.serve.prompt import PromptReader
from equipoise.serve.source import TrainedModel, open_model
from equipoise.spec.device.serving import ServingCurve, serving_file
from equipoise.spec.model.hf_config import model_from_hf_config

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FREE_SHARE = 4
_UNKNOWN_CONTEXT = 4096
"""The context of a model that does not say with which windows it was trained [tokens]."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a model is served."""

    dtype: Literal["fp32", "bf16"] | None = None
    """What it computes in; unless given, what its weights are saved in."""
    device: str = "cpu"
    context_tokens: int | None = None
    """Most tokens of a prompt with its answer; at most what the model was trained with, which it
    is unless given."""
    cache_bytes: int | None = None
    """Memory for keys and values."""
    cache_tokens: int | None = None
    """The same as a number of tokens, which comes first."""
    swap_bytes: int = 0
    """Host memory for those of requests that are preempted."""
    page_tokens: int = 16
    """Rounded up to what the ranks divide."""
    most_sequences: int = 64
    """Sequences that are computed together."""
    queued_requests: int = 256
    """Requests that may wait."""
    iteration_s: float = 0.05
    """Predicted seconds that prompts fill an iteration up to."""
    policy: str = DEFAULT_POLICY
    """Whose turn it is: a name in ``schedule.batching.fair.table``."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of tenants; 1 unless given."""
    context_ranks: int = 1
    """Processes that share every sequence, its attention and its cache."""
    is_invariant: bool = False
    """Whether an answer has the same bits whatever is computed beside it; slower."""
    calibrates: Literal["first", "when idle"] = "first"
    """When it measures what iterations take, where that is not kept: before it answers, or while no
    request is here; until then it prices by an estimate."""
    shares_cores: bool = False
    """Whether fewer threads compute while other processes use the cores; never over ranks or in the
    invariant mode, where it would change bits."""


def open_engine(
    source: Path | str | TrainedModel,
    settings: EngineSettings | None = None,
    *,
    sink: EventSink | None = None,
    curve: ServingCurve | None = None,
    phases: Phases | None = None,
    compiling: "subprocess.Popen[bytes] | None" = None,
) -> EngineLoop:
    """An engine that answers once it is started, or entered as a context.

    Args:
        source: A run, a checkpoint, a Hugging Face folder, a GGUF file, or a model read before.
        settings: How to serve it.
        sink: Where each iteration's predicted and measured seconds go.
        curve: What iterations take; unless given, what was kept of this machine, or measured now.
        phases: Says what this waits for.
        compiling: What ``compile_ahead`` has started, if it was called before.

    Raises:
        SpecError: a setting is out of range.
        ModelError: the model cannot be read, or our own decoder does not compute it.
        FitError: the cache has no room for a page.
        LayoutError: this cannot be done over ranks.
        RanksLostError: a rank did not start.
    """
    settings = settings or EngineSettings()
    ranks = settings.context_ranks
    if ranks < 1:
        raise SpecError(f"context_ranks is {ranks}. It must be at least 1.")
    settings = dataclasses.replace(
        settings, page_tokens=page_tokens_of(ranks, settings.page_tokens)
    )
    trained = source if isinstance(source, TrainedModel) else open_model(source, within_window=True)
    if trained.theirs is not None:
        raise ModelError(
            f"{trained.origin} is computed by the modules of transformers, which keep no pages. "
            f"{_why_theirs(trained)}Continue single texts with equipoise generate."
        )
    if settings.dtype is not None and settings.dtype not in _DTYPES:
        raise SpecError(f'dtype must be "fp32" or "bf16"; it is {shown(settings.dtype)}.')
    phases = phases or Phases()
    shares_cores = settings.shares_cores and settings.device == "cpu" and ranks == 1
    shares_cores = shares_cores and not settings.is_invariant
    cores = SharedCores(torch.get_num_threads()) if shares_cores else None
    prompts = PromptReader(trained.files, trained.model)
    phases.end("Read the tokenizer")
    policy = watch(find_policy(settings.policy))
    context_tokens = _context(trained, settings)
    decoder = build_decoder(trained, _DTYPES[settings.dtype] if settings.dtype else None)
    decoder = decoder.to(torch.device(settings.device))
    page_bytes = settings.page_tokens * token_bytes(trained.model, decoder.embed.weight.dtype)
    served = decoder if settings.device != "cpu" else _fuse(decoder, settings, phases, compiling)
    pages = _pages(settings, context_tokens, page_bytes)
    limits = BatchSettings(
        pages,
        page_tokens=settings.page_tokens,
        most_sequences=settings.most_sequences,
        queued_requests=settings.queued_requests,
        iteration_s=settings.iteration_s,
        prefill_iteration_s=4 * settings.iteration_s,
        swap_pages=settings.swap_bytes // page_bytes,
        shares_chunks=ranks > 1 and not settings.is_invariant,
        weights=settings.weights,
    )
    paged = _paged(served, limits, settings, sink)
    if ranks > 1:
        phases.end(f"Started {ranks} processes and timed what passes between them")
    try:
        price, nano, calibration = _priced(paged, settings, sink, curve, phases, cores)
        scheduler = Scheduler(paced(limits, price, ranks), price, policy)
        return EngineLoop(
            paged,
            prompts,
            scheduler,
            context_tokens=context_tokens,
            sink=sink,
            nano=nano,
            price=price,
            calibration=calibration,
            cores=cores,
        )
    except BaseException:
        paged.close()
        raise


def _priced(
    paged: PagedDecoder,
    settings: EngineSettings,
    sink: EventSink | None,
    curve: ServingCurve | None,
    phases: Phases,
    cores: SharedCores | None,
) -> tuple[PacedPrice, NanoReport, IdleCalibration | None]:
    """The price of iterations, what overlapping is worth, and what of both is measured later."""
    if settings.calibrates == "first":
        price = PacedPrice(CurvePrice(curve or kept_curve(paged, serving_file())))
        nano = open_nano(paged, nano_file(), sink)
        phases.end("Measured what iterations take, or read it")
        return price, nano, None
    with contextlib.suppress(SpecError):
        curve = curve or find_curve(paged, serving_file())
    is_measured, known = curve is not None, find_nano(paged, nano_file(), sink)
    if cores is not None:
        cores.follow()
    price = PacedPrice(CurvePrice(curve or estimate_curve(paged)), is_measured=is_measured)
    (sink or EventSink()).write("decision", "price", is_measured=is_measured)
    if not is_measured:
        phases.end("Estimated what iterations take; it is measured between requests")
    if is_measured and known is not None:
        return price, known, None
    calibration = IdleCalibration(
        paged,
        price,
        curve_file=serving_file(),
        nano_file=nano_file() if known is None else None,
        sink=sink,
        say=phases.say,
    )
    return price, known or LATER, calibration


def _why_theirs(trained: TrainedModel) -> str:
    """What our own decoder does not compute, as a sentence and a blank; empty if nothing."""
    try:
        model_from_hf_config(trained.files.table(CONFIG))
    except ModelError as error:
        return f"{error} "
    return ""


def _paged(
    decoder: ServedDecoder,
    limits: BatchSettings,
    settings: EngineSettings,
    sink: EventSink | None,
) -> PagedDecoder:
    """The decoder with its pool, in this process or over ranks."""
    if settings.context_ranks > 1:
        # They share the cores; more threads than cores wait for each other.
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.context_ranks))
        return ContextDecoder(
            decoder,
            ranks=settings.context_ranks,
            pages=limits.pages,
            page_tokens=limits.page_tokens,
            swap_pages=limits.swap_pages,
            sink=sink,
            is_invariant=settings.is_invariant,
        )
    pool = PoolSizes(limits.pages, limits.page_tokens, limits.swap_pages).allocate(decoder)
    return PagedDecoder(decoder, pool, is_invariant=settings.is_invariant)


def _fuse(
    decoder: Decoder,
    settings: EngineSettings,
    phases: Phases,
    compiling: "subprocess.Popen[bytes] | None",
) -> FusedDecoder:
    """The decoder for answering alone; its kernels are compiled meanwhile."""
    compiling = compiling or compile_ahead(DTYPES[decoder.embed.weight.dtype])
    weights = sum(weight.nbytes for weight in decoder.parameters())
    is_small = settings.context_ranks * weights * _FREE_SHARE < available_bytes()
    fused = FusedDecoder(decoder, _packs(settings, is_small=is_small), keeps_plain=is_small)
    phases.end("Laid the weights out")
    if compiling is not None:
        compiling.wait()
        phases.end("Compiled kernels, once for this installation")
    return fused


def _packs(settings: EngineSettings, *, is_small: bool) -> Packs:
    """Ranks have copies of their own if these are small, else they share the plain weights.

    In the invariant mode they have them in any case: the plain layout has other bits.
    """
    if settings.context_ranks == 1:
        return "now"
    return "by each" if settings.is_invariant or is_small else "never"


def _context(trained: TrainedModel, settings: EngineSettings) -> int:
    known, asked = trained.context_tokens, settings.context_tokens
    if asked is not None and (asked < 1 or asked > (known or asked)):
        most = f" to {known:,}, the model's own" if known else ""
        raise SpecError(f"context_tokens must be from 1{most}; it is {asked:,}.")
    return asked or known or _UNKNOWN_CONTEXT


def _pages(settings: EngineSettings, context_tokens: int, page_bytes: int) -> int:
    """Pages of the pool."""
    if settings.page_tokens < 1:
        raise SpecError(f"page_tokens is {settings.page_tokens}. It must be at least 1.")
    if settings.cache_tokens is not None:
        if settings.cache_tokens < settings.page_tokens:
            raise SpecError(
                f"The cache has {settings.cache_tokens:,} tokens, and one page has "
                f"{settings.page_tokens}. Give it more."
            )
        return settings.cache_tokens // settings.page_tokens
    size = settings.cache_bytes
    if size is None:
        size = available_bytes() // _FREE_SHARE
        longest = -(-context_tokens // settings.page_tokens)
        size = min(size, settings.most_sequences * longest * page_bytes)
    if size < page_bytes:
        raise FitError(
            f"The cache has {format_bytes(size)}, and one page of {settings.page_tokens} tokens "
            f"needs {format_bytes(page_bytes)}. Give it more memory."
        )
    return size // page_bytes
