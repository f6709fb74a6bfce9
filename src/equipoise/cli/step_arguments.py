"""What a step is, by the flags that ``equipoise simulate`` and ``equipoise plan`` share."""

import argparse

_CONTEXT_STRATEGIES = ("needed-kv", "all-gather", "ring", "ulysses")


def add_step_arguments(
    parser: argparse.ArgumentParser, *, is_searched: bool = False, needs_sizes: bool = True
) -> None:
    """Declare what a step is, whoever lays it out.

    Args:
        parser: The verb's.
        is_searched: Whether what lays a step out is searched where it is not given.
        needs_sizes: Whether the parser itself requires the step's sizes.
    """
    searched = "searched" if is_searched else None
    parser.add_argument(
        "--model",
        required=not is_searched,
        metavar="NAME|WORDS|FILE",
        help="a known model, layers=..,hidden=..,heads=..,vocab=.., or a config.json",
    )
    parser.add_argument(
        "--cluster",
        required=not is_searched,
        metavar="NAME:DEVICES|FILE",
        help="as h100-sxm:8192, or a cluster.toml",
    )
    parser.add_argument(
        "--context-tokens",
        type=int,
        required=needs_sizes and not is_searched,
        metavar="N",
        help="tokens of a sequence",
    )
    parser.add_argument(
        "--step-sequences",
        type=int,
        required=needs_sizes and not is_searched,
        metavar="N",
        help="sequences of one step, over all ranks",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=None if is_searched else 1,
        metavar="N",
        help=f"sequences of one micro-batch (default: {searched or 1})",
    )
    parser.add_argument(
        "--recompute",
        default=None if is_searched else "none",
        choices=["none", "attention", "selective", "every-2", "every-3", "every-4", "full"],
        help=f"what layers make again in the backward (default: {searched or 'none'})",
    )
    parser.add_argument(
        "--offload",
        default=None if is_searched else "none",
        choices=["none", "optimizer", "activations", "both", *["any"] * is_searched],
        help="what is kept in host memory: "
        + (
            "any searches all (default: none, and what nothing would fit without)"
            if is_searched
            else "fp32 weights and moments, activations of all layers but two (default: none)"
        ),
    )
    parser.add_argument(
        "--precision",
        choices=["bf16", "fp8", "fp32"],
        default="bf16",
        help="of matrix products; fp32 also of what is kept and sent (default: bf16)",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help="order of a pipeline's work, as equipoise explain pipeline lists them (default: "
        f"{searched or '1f1b, and interleaved where virtual is above 1'})",
    )
    parser.add_argument(
        "--context-strategy",
        default=None if is_searched else "needed-kv",
        choices=list(_CONTEXT_STRATEGIES),
        help=f"what travels between context ranks (default: {searched or 'needed-kv'})",
    )
    parser.add_argument(
        "--order",
        default=None if is_searched else "dp-pp",
        choices=["dp-pp", "pp-dp"],
        help="which of two axes is outermost: dp-pp puts stages next to each other, pp-dp the "
        f"ranks that share weights (default: {searched or 'dp-pp'})",
    )
    parser.add_argument(
        "--expert-skew",
        type=float,
        default=1.0,
        metavar="RATIO",
        help="rows of the expert rank that has most, over the mean (default: 1, balanced)",
    )
    parser.add_argument(
        "--lengths",
        metavar="NAME|FILE",
        help="document lengths: pretrain-128k, prolong, python-stdlib, wikipedia, or a file of "
        "lengths (default: full windows)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="pack.policy, which makes micro-batches of documents; with --lengths"
        + (
            "; any searches by-work, by-tokens and all that divide but flexsp"
            if is_searched
            else ""
        )
        + " (default: by-work)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the documents drawn (default: 0)"
    )


def add_sources_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--sources``."""
    parser.add_argument(
        "--sources", action="store_true", help="also print where each number comes from"
    )
