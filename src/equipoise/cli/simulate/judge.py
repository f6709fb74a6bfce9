"""What ``simulate`` and ``plan`` refuse before they price: numbers of no step, idle flags.

Why
    A flag that changes nothing was meant to change something: whoever gave it reads an answer to
    another question.

Kept true (tests/unit/cli/simulate/test_judge.py, test_plan.py)
    Each of them is refused in one sentence, by both verbs; what is given as its default is not.
"""

import argparse
import math
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError

if TYPE_CHECKING:
    from equipoise.spec.device.spec import DeviceSpec

_MOST_TOKENS = 2**31 - 1
"""As of a document: attention kernels count in int32."""

_MOST_SEQUENCES = 1 << 20
"""Of a step: each micro-batch is replayed."""


def judge_numbers(args: argparse.Namespace, device: "DeviceSpec") -> None:
    """Refuse numbers of a step that is none, and a precision that the device lacks.

    Args:
        args: The flags; those that are searched are None.
        device: That computes.

    Raises:
        SpecError: names the flag.
    """
    for name, most in (
        ("context_tokens", _MOST_TOKENS),
        ("step_sequences", _MOST_SEQUENCES),
        ("micro_batch", _MOST_SEQUENCES),
    ):
        value: int | None = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            raise SpecError(
                f"--{name.replace('_', '-')} is {value}. Give a whole number of 1 to {most:,}."
            )
    if args.seed < 0:
        raise SpecError(f"--seed is {args.seed}. Give a whole number of 0 or more.")
    if not 1 <= args.expert_skew < math.inf:
        raise SpecError(
            f"--expert-skew is {args.expert_skew:g}. Give the rows of the expert rank that has "
            f"most over the mean: 1 is balanced."
        )
    if args.precision == "fp8" and "fp8" not in device.dtypes:
        raise SpecError(
            f"--precision fp8: {device.name} multiplies {', '.join(device.dtypes)} alone. Give "
            f"bf16, for which fp16 stands where there is no bf16, or fp32."
        )


def judge_failures(args: argparse.Namespace) -> None:
    """Refuse flags of failures where nothing fails.

    Args:
        args: The flags of ``simulate``.

    Raises:
        SpecError: names the flag, and what it needs.
    """
    if args.mtbf_hours is not None:
        return
    for name in ("checkpoint_s", "checkpoint_steps", "restart_s"):
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise SpecError(
                f"{flag} {getattr(args, name):g} is of a run that fails, and nothing does. "
                f"Give --mtbf-hours too, or leave {flag} out."
            )


def judge_idle(args: argparse.Namespace, *, experts: int, cp: int | None) -> None:
    """Refuse flags of a step that would change nothing.

    Args:
        args: The flags that ``simulate`` and ``plan`` share; those that are searched are None.
        experts: Of the model; 0 where it has none.
        cp: Ranks that share the tokens of a micro-batch; None where that is searched.

    Raises:
        SpecError: names the flag, and what it needs.
    """
    if args.lengths is None and args.policy is not None:
        raise SpecError(
            f"--policy {args.policy} packs documents, and there are none. Give --lengths too, or "
            f"leave --policy out."
        )
    if args.context_strategy not in (None, "needed-kv") and cp == 1:
        raise SpecError(
            f"--context-strategy {args.context_strategy} is of context ranks, and cp is 1. Give cp "
            f"of 2 or more, or leave it out."
        )
    if args.expert_skew != 1 and not experts:
        raise SpecError(
            f"--expert-skew {args.expert_skew:g} is of experts, and the model has none. Leave it "
            f"out."
        )
