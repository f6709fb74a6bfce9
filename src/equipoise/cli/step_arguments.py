"""What a step is, and how a trace is served, by flags that simulate and plan share."""

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import SpecError

if TYPE_CHECKING:
    from equipoise.sim.serve.answer import Objective

_CONTEXT_STRATEGIES = ("needed-kv", "all-gather", "ring", "ulysses")

SERVING = ("requests", "fair", "slo")
"""Flags that only a trace needs."""
SHARED = ("model", "cluster", "layout", "precision", "expert_skew")
"""Flags that a step and a trace both read."""

_FORM = "Write [TENANT:]ttft=SECONDS,tpot=SECONDS, one of the two or both."


def add_step_arguments(
    parser: argparse.ArgumentParser, *, is_searched: bool = False, needs_any: bool = True
) -> None:
    """Declare what a step is, whoever lays it out.

    Args:
        parser: The verb's.
        is_searched: Whether what lays a step out is searched where it is not given.
        needs_any: Whether the parser itself requires what a step cannot do without.
    """
    searched = "searched" if is_searched else None
    several = ", eplb, or any, which searches them all with" if is_searched else " or eplb"
    several += " 1, 2, 4 and so on slots up to --expert-slots" if is_searched else ""
    parser.add_argument(
        "--model",
        required=needs_any and not is_searched,
        metavar="NAME|WORDS|FILE",
        help="a known model, layers=..,hidden=..,heads=..,vocab=.., or a config.json",
    )
    parser.add_argument(
        "--cluster",
        required=needs_any and not is_searched,
        metavar="NAME:DEVICES|FILE",
        help="as h100-sxm:8192, or a cluster.toml",
    )
    parser.add_argument(
        "--context-tokens",
        type=int,
        required=needs_any and not is_searched,
        metavar="N",
        help="tokens of a sequence",
    )
    parser.add_argument(
        "--step-sequences",
        type=int,
        required=needs_any and not is_searched,
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
        metavar="NAME",
        help="what layers make again in the backward: none, attention, selective, every-2 to "
        "every-4, full, or modules of a program that has them, as layernorm+moe_act (default: "
        f"{searched or 'none'})",
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
        choices=list(_CONTEXT_STRATEGIES),
        help="what travels between context ranks (default: "
        f"{searched or 'that of the program; of equipoise needed-kv'})",
    )
    parser.add_argument(
        "--order",
        choices=["dp-pp", "pp-dp"],
        help="which of two axes is outermost: dp-pp puts stages next to each other, pp-dp the "
        "ranks that share weights (default: "
        f"{searched or 'that of the program; of equipoise dp-pp'})",
    )
    parser.add_argument(
        "--program",
        default="equipoise",
        metavar="NAME|FILE",
        help="who trains: equipoise, megatron-core, nemo, torchtitan, fsdp, deepspeed, one of "
        "their variants, or a program.toml; what it cannot run is "
        f"{'not searched' if is_searched else 'refused'} (default: equipoise)",
    )
    parser.add_argument(
        "--expert-skew",
        type=float,
        default=1.0,
        metavar="RATIO",
        help="rows of the expert rank that has most, over the mean (default: 1, balanced)",
    )
    parser.add_argument(
        "--expert-loads",
        metavar="KIND|RUN",
        help="what routers choose, W0 to W7 or the folder of a run, instead of --expert-skew: "
        "every number of ranks that share experts has a skew of its own",
    )
    parser.add_argument(
        "--expert-policy",
        default="fixed",
        metavar="NAME",
        help=f"what balances those loads: fixed, exact, hecate{several} (default: fixed)",
    )
    parser.add_argument(
        "--expert-slots",
        type=int,
        default=1,
        metavar="N",
        help="most copies of experts that a rank holds (default: 1)",
    )
    parser.add_argument(
        "--lengths",
        metavar="LIST|NAME|FILE",
        help="document lengths: a list as in 3000,40,900; pretrain-128k, prolong, python-stdlib, "
        "wikipedia; or a file of lengths (default: full windows)",
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


def say_forecast(args: argparse.Namespace) -> None:
    """Say on standard error how a forecast of the model is to be read, unless asked to be quiet."""
    from equipoise.spec.words import forecast_note

    if (note := forecast_note(args.model, args.context_tokens)) and not args.quiet:
        sys.stderr.write(f"{note}\n")


def add_serving_arguments(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Declare what serving is; returns the group, for flags of one verb."""
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--requests",
        type=Path,
        metavar="TRACE",
        help="requests to serve (.jsonl or .csv), in place of a step to train",
    )
    serving.add_argument(
        "--fair",
        metavar="POLICY",
        help="who is next: fifo, job-fair, user-fair, vtc or uwfq (default: uwfq)",
    )
    serving.add_argument(
        "--slo",
        action="append",
        metavar="[TENANT:]ttft=S,tpot=S",
        help="objectives of requests, in seconds, for goodput; again for tenants of their own",
    )
    return serving


def require_of_serving(
    args: argparse.Namespace,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    known: Collection[str],
) -> None:
    """Refuse flags that say nothing about a trace.

    Args:
        args: What was given.
        add_arguments: The verb's own, for their defaults.
        known: Flags that are read.

    Raises:
        SpecError: names the first other one.
    """
    plain = argparse.ArgumentParser()
    add_arguments(plain)
    for action in plain._actions:
        name = action.dest
        if name in (*known, "help") or not hasattr(args, name):
            continue
        if getattr(args, name) != plain.get_default(name):
            shown = action.option_strings[0] if action.option_strings else str(getattr(args, name))
            raise SpecError(
                f"{shown} describes a step to train and changes nothing for --requests. Leave it "
                "out."
            )


def serving_of(args: argparse.Namespace) -> dict[str, Any]:
    """What is asked of serving a trace, as arguments of a request.

    Raises:
        SpecError: as ``read_objectives``.
    """
    from equipoise.schedule.batching.fair.table import DEFAULT_POLICY

    return {
        "precision": args.precision,
        "fair": args.fair or DEFAULT_POLICY,
        "objectives": read_objectives(args.slo or []),
        "expert_skew": args.expert_skew,
    }


def read_objectives(texts: Sequence[str]) -> "dict[str, Objective]":
    """Objectives by tenant, "" for those not named.

    Raises:
        SpecError: a text is not of the form, or a tenant is given twice.

    >>> read_objectives(["ttft=1,tpot=0.1", "gold:ttft=0.2"])["gold"].ttft_s
    0.2
    """
    from equipoise.sim.serve.answer import Objective

    objectives: dict[str, Objective] = {}
    for text in texts:
        tenant, _, words = text.rpartition(":")
        if tenant in objectives:
            whose = f"of {tenant} " if tenant else ""
            raise SpecError(f"--slo {text}: an objective {whose}is given twice. Give it once.")
        seconds: dict[str, float] = {}
        for word in words.split(","):
            name, _, value = (part.strip() for part in word.partition("="))
            try:
                number = float(value)
            except ValueError:
                number = -1.0
            if name not in ("ttft", "tpot") or name in seconds or not number > 0:
                raise SpecError(f'--slo {text}: "{word}" is not an objective. {_FORM}')
            seconds[name] = number
        objectives[tenant] = Objective(**{f"{name}_s": value for name, value in seconds.items()})
    return objectives
