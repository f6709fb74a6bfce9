"""Flags of serving a trace, which ``equipoise simulate`` and ``equipoise plan`` share."""

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError

if TYPE_CHECKING:
    from equipoise.sim.serve.answer import Objective

SERVING = ("requests", "fair", "slo")
"""Flags that only a trace needs."""
SHARED = ("model", "cluster", "layout", "precision", "expert_skew")
"""Flags that a step and a trace both read."""

_FORM = "Write [TENANT:]ttft=SECONDS,tpot=SECONDS, one of the two or both."


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
