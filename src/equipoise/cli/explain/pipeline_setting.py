"""What ``equipoise explain --schedule`` is asked: micro-batches, stages, assumed machine.

What it decides
    Micro-batches are never invented: documents are packed by a policy, as a run's would be, and
    each micro-batch is priced by its own documents. What ``--lengths`` lists is one step, its
    documents whole where the policy keeps them whole. The pipeline is that of data-parallel
    rank 0, and each stage is one rank.
"""

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cli.explain.attention_setting import (
    BYTES,
    EXAMPLE_MODEL,
    EXAMPLE_RANKS,
    read_link,
)
from equipoise.cli.lengths import document_lengths, listed_lengths
from equipoise.cli.run_arguments import run_from

if TYPE_CHECKING:
    from equipoise.balance.stage import LayerPrices
    from equipoise.base.arrays import Ints
    from equipoise.schedule.attention.score import AssumedMachine
    from equipoise.spec.model.presets import ModelSpec
    from equipoise.spec.pack import MicroBatch, Pieces
    from equipoise.spec.run.resolve import ResolvedRun
    from equipoise.spec.run.spec import PackSpec, Recompute

EXAMPLE_MICRO_BATCHES = 8
EXAMPLE_CONTEXT = 8192

_SKIP = 0.25

_SPEEDS = (0.001, 1e6)
"""TFLOP/s for which the largest models' steps, and the smallest's, are whole nanoseconds."""

_IN_WINDOWS = ("in-order", "fixed", "fixed-exact")
"""Policies that cut documents at windows by themselves."""


@dataclass(frozen=True, slots=True)
class PipelineSetting:
    """What every strategy is explained for."""

    strategy: str
    ranks: int
    chunks: int | None
    """Stages of a rank, where it is said."""
    batches: "tuple[MicroBatch, ...]"
    units: list[tuple[int, int]]
    policy: str
    origin: str
    model: "ModelSpec"
    model_name: str
    dtype: str
    recompute: "Recompute"
    machine: "AssumedMachine"
    layers: "LayerPrices"
    """Forward times of one layer and of the head."""
    hop_ns: "Ints"
    token_bytes: int
    """Activations of one token in one layer, kept for its backward [bytes]."""
    most_bytes: int | None
    """Activations that a rank may hold, if a bound is set [bytes]."""
    skip: float
    is_arranged: bool
    is_alone: bool
    """Whether one rank computes each stage; what shares one in the run's layout is not priced."""

    @property
    def documents(self) -> int:
        """Documents that these micro-batches hold, each once however it is divided."""
        divided, whole = set[tuple[int, int]](), 0
        for batch in self.batches:
            if batch.attends_from is None:
                whole += len(batch.pieces)
            else:
                starts = batch.attends_from.tolist()
                divided |= set(zip(batch.pieces[:, 0].tolist(), starts, strict=True))
        return whole + len(divided)

    @property
    def share_bytes(self) -> float:
        """Activations of the mean micro-batch in a rank's share of the layers [bytes]."""
        tokens = int(self.layers.tokens.sum())
        whole = self.token_bytes * self.model.layers * tokens
        return whole / len(self.batches) / self.ranks


def pipeline_setting_from(args: argparse.Namespace) -> PipelineSetting:
    """What the parsed arguments ask for.

    Raises:
        SpecError: a flag, or a key of the run, that is wrong.
        DataError: lengths that cannot be read.
        LayoutError: documents that the policy cannot pack.
    """
    from equipoise.balance.packing.divided import macro_units
    from equipoise.balance.packing.pack import pack_step, require_policy
    from equipoise.balance.stage import price_layers
    from equipoise.cost.curve import counted_curve
    from equipoise.schedule.attention.score import AssumedMachine

    _judge(args)
    _override(args)
    resolved = run_from(args)
    model, train, layout = resolved.model, resolved.spec.train, resolved.spec.layout
    machine = AssumedMachine(1e12 * args.tflop_per_s, read_link("--link", args.link))
    curve = counted_curve(model, flop_per_s=machine.flop_per_s)
    dp, has_stages = layout.dp, layout.pp > 1
    ranks = args.ranks or (layout.pp if has_stages else EXAMPLE_RANKS)
    require_policy(resolved.spec.pack.policy, context=layout.cp, pipeline=ranks)
    pieces, pack, origin = _step(args, resolved, 1 if dp == "cores" else dp)
    if not len(pieces):
        raise SpecError(f"--lengths {args.lengths}: there is no token to train on. Give lengths.")
    batches = pack_step(pieces, pack, 1 if dp == "cores" else dp, curve).ranks[0]
    if not sum(batch.tokens for batch in batches):
        raise LayoutError(
            f"The policy {pack.policy} puts none of the step's {len(pieces)} documents into rank "
            f"0's micro-batches. Give more documents, or take by-work."
        )
    width = BYTES[args.dtype][0]
    layers = price_layers(curve, model, batches)
    hop_s = machine.link.latency_s + layers.tokens * model.hidden * width / (
        machine.link.bytes_per_s
    )
    setting = PipelineSetting(
        strategy=args.strategy or layout.schedule,
        ranks=ranks,
        chunks=args.chunks or layout.virtual,
        batches=batches,
        units=macro_units(batches),
        policy=pack.policy,
        origin=origin if dp in (1, "cores") else f"{origin}, rank 0 of {dp}",
        model=model,
        model_name=resolved.spec.model.preset,
        dtype=args.dtype,
        recompute=train.recompute,
        machine=machine,
        layers=layers,
        hop_ns=np.rint(1e9 * hop_s).astype(np.int64),
        token_bytes=_token_bytes(model, args.dtype, train.recompute),
        most_bytes=None if args.memory is None else int(args.memory * (1 << 30)),
        skip=(layout.skip or _SKIP) if args.skip is None else args.skip,
        is_arranged=args.arranged,
        is_alone=layout.cp * layout.tp == 1,
    )
    if args.most_held is not None:
        setting = replace(setting, most_bytes=round(args.most_held * setting.share_bytes))
    return setting


def _judge(args: argparse.Namespace) -> None:
    from equipoise.schedule.pipeline.strategies import LOSSY

    for flag in ("most_held", "memory"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < float("inf"):
            raise SpecError(
                f"--{flag.replace('_', '-')} {value:g} holds nothing. Give a number above 0."
            )
    if args.most_held is not None and args.memory is not None:
        raise SpecError("--most-held and --memory bound the same. Give one of them.")
    if args.skip is not None and args.strategy not in ("all", *LOSSY):
        raise SpecError(
            f"--skip {args.skip:g} goes with --strategy {' or '.join(LOSSY)}, which train another "
            f"model, not with {args.strategy or '1f1b'}. Leave it out."
        )
    least, most = _SPEEDS
    if not least <= args.tflop_per_s <= most:
        raise SpecError(
            f"--tflop-per-s {args.tflop_per_s:g} is not between {least:g} and {most:,.0f}, and "
            f"times are whole nanoseconds. Give a speed of a rank in TFLOP/s."
        )
    if args.dtype == "fp64":
        raise SpecError("--dtype fp64: a pipeline's activations are bf16 or fp32. Give one.")


def _override(args: argparse.Namespace) -> None:
    """Flags, and what stands for a run where none is given, as keys of the run."""
    keys = {key for key, _ in args.overrides}
    is_bare = args.run_toml is None
    if args.model is not None:
        args.overrides.append(("model.preset", args.model))
    elif is_bare and not any(key.startswith("model.") for key in keys):
        args.overrides.append(("model.preset", EXAMPLE_MODEL))
    if args.policy is not None:
        args.overrides.append(("pack.policy", args.policy))
    window = args.context_tokens
    if window is None and is_bare and "pack.context_tokens" not in keys:
        window = EXAMPLE_CONTEXT
    if is_bare and args.micro_batches is None and "pack.step_tokens" not in keys:
        args.micro_batches = EXAMPLE_MICRO_BATCHES
    if window is not None:
        args.overrides.append(("pack.context_tokens", str(window)))
        if args.micro_batches is not None:
            args.overrides.append(("pack.step_tokens", str(args.micro_batches * window)))
    if is_bare and "layout.dp" not in keys:
        args.overrides.append(("layout.dp", "1"))


def _step(
    args: argparse.Namespace, resolved: "ResolvedRun", data_ranks: int
) -> "tuple[Pieces, PackSpec, str]":
    """The documents of one step, how they are packed, and where they come from."""
    pack = resolved.spec.pack
    if args.micro_batches is not None:
        step_tokens = args.micro_batches * data_ranks * pack.context_tokens
        pack = replace(pack, step_tokens=step_tokens)
    has_corpus = args.run_toml is not None or any(k.startswith("data.") for k, _ in args.overrides)
    listed = None if args.lengths is None else listed_lengths(args.lengths)
    if listed is not None:
        lengths = np.array([each for each in listed if each], dtype=np.int64)
        return _whole(lengths), _for_listed(args, pack, lengths, data_ranks), "--lengths"
    if args.lengths is None and not has_corpus:
        count = -(-pack.step_tokens // pack.context_tokens)
        equal = np.full(count, pack.context_tokens, dtype=np.int64)
        return _whole(equal), pack, "an example, all alike"
    from equipoise.data.stream import DocumentStream

    found, origin = document_lengths(
        args.lengths,
        resolved,
        least_tokens=pack.step_tokens,
        is_quiet=args.quiet or args.json,
    )
    seed = resolved.spec.train.seed
    stream = DocumentStream(found, seed=seed, context_tokens=pack.context_tokens)
    source = origin.partition(" (")[0]
    return stream.step(0, pack.step_tokens), pack, f"first step of {source}"


def _whole(lengths: "Ints") -> "Pieces":
    return np.stack((np.arange(len(lengths)), np.zeros_like(lengths), lengths), axis=1)


def _for_listed(
    args: argparse.Namespace, pack: "PackSpec", lengths: "Ints", data_ranks: int
) -> "PackSpec":
    """Windows that make as many micro-batches as are asked for, and a cap that no one breaks."""
    if args.context_tokens is None and args.micro_batches is not None:
        window = max(2, -(-int(lengths.sum()) // (args.micro_batches * data_ranks)))
        pack = replace(pack, context_tokens=window)
    if pack.policy in (*_IN_WINDOWS, "divided-in-time"):
        return pack
    longest = int(lengths.max(initial=0))
    return replace(pack, max_tokens=max(pack.most_tokens, longest))


def _token_bytes(model: "ModelSpec", dtype: str, recompute: "Recompute") -> int:
    """Kept of one token in the mean layer, by the forecast of memory [bytes]."""
    from equipoise.cost.memory.layer import token_bytes
    from equipoise.spec.layout import Layout
    from equipoise.spec.recompute import layer_recompute

    width = 2 if dtype == "bf16" else 4
    kept = [
        token_bytes(
            model,
            Layout(),
            width=width,
            sparse=model.is_sparse(layer),
            recompute=layer_recompute(recompute, layer),
        ).kept
        for layer in range(model.layers)
    ]
    return round(sum(kept) / model.layers)
