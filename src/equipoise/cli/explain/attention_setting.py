"""What ``equipoise explain --attention`` is asked: documents, ranks, model, assumed machine."""

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.cli.lengths import document_lengths, listed_lengths
from equipoise.cli.run_arguments import run_from

if TYPE_CHECKING:
    from equipoise.schedule.attention.price import LinkPrice
    from equipoise.schedule.attention.score import AssumedMachine, AttentionScore
    from equipoise.spec.mask import Mask
    from equipoise.spec.model.presets import ModelSpec
    from equipoise.spec.run.resolve import ResolvedRun

RSA = "rsa"
"""The original ring self-attention: the strategy ``ring``, tokens dealt in one run each."""

EXAMPLE_DOCUMENTS = (24_000, 320, 7_200, 1_024, 224)
EXAMPLE_TOKENS = sum(EXAMPLE_DOCUMENTS)
EXAMPLE_MODEL = "llama3-8b"
EXAMPLE_RANKS = 4

BYTES = {"bf16": (2, 4), "fp32": (4, 4), "fp64": (8, 8)}
"""Of an element and of a sum, by dtype."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What every strategy is explained for."""

    strategy: str
    sharding: str
    doc_tokens: tuple[int, ...]
    origin: str
    mask: "Mask"
    ranks: int
    ranks_per_node: int
    """Of the strategies in two levels."""
    model: "ModelSpec"
    model_name: str
    dtype: str
    machine: "AssumedMachine"


def setting_from(args: argparse.Namespace) -> Setting:
    """What the parsed arguments ask for.

    Raises:
        SpecError: a flag, or a key of the run, that is wrong.
        DataError: lengths that cannot be read.
    """
    from equipoise.balance.context.price import TILE_S
    from equipoise.balance.tiles import TILE
    from equipoise.schedule.attention.score import AssumedMachine

    keys = {key for key, _ in args.overrides}
    has_model = args.run_toml is not None or any(key.startswith("model.") for key in keys)
    model = args.model or (None if has_model else EXAMPLE_MODEL)
    if model is not None:
        args.overrides.append(("model.preset", model))
    window = args.context_tokens
    if window is None and args.run_toml is None and "pack.context_tokens" not in keys:
        window = EXAMPLE_TOKENS
    if window is not None:
        args.overrides += [("pack.context_tokens", str(window))]
        if "pack.step_tokens" not in keys:
            args.overrides += [("pack.step_tokens", str(window))]
    for flag, key in (
        ("ranks", "layout.cp"),
        ("sharding", "layout.sharding"),
        ("ranks_per_node", "layout.ranks_per_node"),
    ):
        if getattr(args, flag) is not None:
            args.overrides.append((key, str(getattr(args, flag))))
    if args.strategy not in (None, "all", RSA):
        args.overrides.append(("layout.strategy", args.strategy))
    if args.ranks is None and args.run_toml is None and "layout.cp" not in keys:
        args.overrides.append(("layout.cp", str(EXAMPLE_RANKS)))
    if "layout.dp" not in keys:
        args.overrides.append(("layout.dp", "1"))
    resolved = run_from(args)
    layout = resolved.spec.layout
    doc_tokens, origin = _documents(args, resolved)
    per_node = layout.ranks_per_node
    in_node = (
        None if per_node is None else read_link("--link-in-node", args.link_in_node or "10:450")
    )
    link = read_link("--link", args.link)
    return Setting(
        strategy=args.strategy or layout.strategy,
        sharding=layout.sharding,
        doc_tokens=doc_tokens,
        origin=origin,
        mask=_mask(args.mask or "causal"),
        ranks=layout.cp,
        ranks_per_node=per_node or _nodes_of(layout.cp),
        model=resolved.model,
        model_name=resolved.spec.model.preset,
        dtype=args.dtype,
        machine=AssumedMachine(
            1e12 * args.tflop_per_s, link, in_node, per_node, block=TILE, tile_s=TILE_S
        ),
    )


def _nodes_of(ranks: int) -> int:
    """Ranks on a node where nobody said: the largest divisor that leaves at least as many nodes."""
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)


def _mask(text: str) -> "Mask":
    from equipoise.spec.mask import Mask

    kind, _, tokens = text.partition(":")
    if text == "causal":
        return Mask()
    if text == "full":
        return Mask("full")
    if kind == "window" and tokens.isdigit():
        return Mask("window", int(tokens))
    raise SpecError(f'--mask: "{text}" is not causal, full, or a window as in window:4096.')


def read_link(flag: str, text: str) -> "LinkPrice":
    """A link as a flag gives it, as in 10:50.

    Raises:
        SpecError: the flag's text is none.
    """
    from equipoise.schedule.attention.price import LinkPrice

    latency, _, bandwidth = text.partition(":")
    try:
        found = float(latency) / 1e6, 1e9 * float(bandwidth)
        if not all(map(math.isfinite, found)):
            raise ValueError
        return LinkPrice(*found)
    except ValueError:
        raise SpecError(
            f'{flag}: "{text}" is no latency in us and bandwidth in GB/s, as in 10:50.'
        ) from None


def _documents(args: argparse.Namespace, resolved: "ResolvedRun") -> tuple[tuple[int, ...], str]:
    text: str | None = args.lengths
    has_corpus = args.run_toml is not None or any(k.startswith("data.") for k, _ in args.overrides)
    if text is None and not has_corpus:
        return EXAMPLE_DOCUMENTS, "an example"
    listed = None if text is None else listed_lengths(text)
    if listed is not None:
        return listed, "--lengths"
    from equipoise.data.stream import DocumentStream

    window = resolved.spec.pack.context_tokens
    lengths, origin = document_lengths(
        text, resolved, least_tokens=window, is_quiet=args.quiet or args.json
    )
    stream = DocumentStream(lengths, seed=resolved.spec.train.seed, context_tokens=window)
    pieces = stream.step(0, window)
    source = origin.partition(" (")[0]
    return tuple((pieces[:, 2] - pieces[:, 1]).tolist()), f"first window of {source}"


def score_strategy(name: str, setting: Setting) -> "AttentionScore":
    """One strategy by name, over the sharding that is asked for.

    Raises:
        LayoutError: ranks, documents or heads do not go together.
        SpecError: no sharding has that name.
    """
    import numpy as np

    from equipoise.balance.context.price import ContextPrice
    from equipoise.balance.context.sharding import ContextRequest, split_context
    from equipoise.schedule.attention.count import Wire

    model, nodes, mask = setting.model, setting.ranks_per_node, setting.mask
    moves = "ring" if name == RSA else name
    wire = Wire(model.head_width, *BYTES[setting.dtype])
    price = ContextPrice(setting.machine, moves, model.heads, model.kv_heads, wire)
    split = split_context(
        setting.doc_tokens,
        setting.ranks,
        "contiguous" if name == RSA else setting.sharding,
        ranks_per_node=nodes,
        mask=mask,
        price=price,
    )
    lengths = np.array(setting.doc_tokens, dtype=np.int64)
    request = ContextRequest(lengths, setting.ranks, ranks_per_node=nodes, mask=mask)
    return price.score(split, request, name=name)
