"""What a step is, by the flags that ``simulate`` and ``plan`` share."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from equipoise.base.errors import SpecError

if TYPE_CHECKING:
    from equipoise.cost.step.request import StepOptions
    from equipoise.sim.divided import DividedStep
    from equipoise.sim.step import Documents
    from equipoise.spec.cluster.spec import ClusterSpec
    from equipoise.spec.device.by_name import DeviceSpec, Dtype
    from equipoise.spec.layout import Layout
    from equipoise.spec.model.presets import ModelSpec
    from equipoise.spec.pack import Pieces
    from equipoise.spec.run.spec import Policy


_POLICY = "by-work"

_CONTEXT_STRATEGIES = ("needed-kv", "all-gather", "ring", "ulysses")


def add_step_arguments(parser: argparse.ArgumentParser, *, is_searched: bool = False) -> None:
    """Declare what a step is, whoever lays it out.

    Args:
        parser: Of the verb.
        is_searched: Whether what lays a step out is searched where it is not given.
    """
    found = "searched" if is_searched else None
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
        required=not is_searched,
        metavar="N",
        help="tokens of a sequence",
    )
    parser.add_argument(
        "--step-sequences",
        type=int,
        required=not is_searched,
        metavar="N",
        help="sequences of one step, over all ranks",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=None if is_searched else 1,
        metavar="N",
        help=f"sequences of one micro-batch (default: {found or 1})",
    )
    parser.add_argument(
        "--recompute",
        default=None if is_searched else "none",
        choices=["none", "attention", "selective", "every-2", "every-3", "every-4", "full"],
        help=f"what layers make again in the backward (default: {found or 'none'})",
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
        f"{found or '1f1b, and interleaved where virtual is above 1'})",
    )
    parser.add_argument(
        "--context-strategy",
        default=None if is_searched else "needed-kv",
        choices=list(_CONTEXT_STRATEGIES),
        help=f"what travels between context ranks (default: {found or 'needed-kv'})",
    )
    parser.add_argument(
        "--order",
        default=None if is_searched else "dp-pp",
        choices=["dp-pp", "pp-dp"],
        help="which of two axes is outermost: dp-pp puts stages next to each other, pp-dp the "
        f"ranks that share weights (default: {found or 'dp-pp'})",
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


def step_options(args: argparse.Namespace, virtual: int, device: "DeviceSpec") -> "StepOptions":
    """What the flags say about a step on this device."""
    from equipoise.base.nearest import nearest
    from equipoise.cli.simulate.judge import judge_numbers
    from equipoise.cost.step.request import StepOptions, residuals_of
    from equipoise.schedule.pipeline.strategies import LOSSY, STRATEGIES

    judge_numbers(args, device)
    schedule = args.schedule or ("interleaved" if virtual > 1 else "1f1b")
    known = [name for name in STRATEGIES if name not in LOSSY]
    if schedule not in known:
        raise SpecError(
            f'--schedule: "{schedule}" is not one of {", ".join(known)}. Nearest: '
            f'"{nearest(schedule, known)}".'
        )
    return StepOptions(
        args.context_tokens,
        args.step_sequences,
        micro_batch=args.micro_batch,
        virtual=virtual,
        schedule=schedule,
        recompute=args.recompute,
        offload=args.offload,
        precision=args.precision,
        expert_skew=args.expert_skew,
        policy=args.policy or _POLICY,
        context_strategy=args.context_strategy,
        seed=args.seed,
        residuals=residuals_of(device),
    )


def require_kernel_prices(model: "ModelSpec", cluster: "ClusterSpec", precision: str) -> None:
    """Refuse layers of their own where steps are priced from timed parts, which are of whole steps.

    Raises:
        SpecError: names the cluster.
    """
    from equipoise.cost.curves.parts import is_timed

    dtype: Dtype = "fp32" if precision == "fp32" else "bf16"
    if precision != "fp8" and is_timed(cluster.device, model, dtype, cluster.devices):
        raise SpecError(
            f"--layers prices each layer from kernels alone, and steps of this model on "
            f"{cluster.name} are priced from parts that were timed, which hold the host's time: "
            f"the two are not to be compared. Leave --layers out."
        )


def require_no_offload(args: argparse.Namespace) -> None:
    """Refuse layers of their own that offload.

    Raises:
        SpecError: says what to leave out.
    """
    if args.offload not in (None, "none"):
        raise SpecError(
            f"Layers of their own keep all on the device, and --offload {args.offload} does not. "
            f"Leave one of --layers and --offload out."
        )


def step_documents(
    args: argparse.Namespace, layout: "Layout", options: "StepOptions"
) -> "Documents | DividedStep | None":
    """Documents of one step, packed by the policy; None for full windows."""
    pack = step_packer(args, options)
    return None if pack is None else pack(layout, options)


def step_packer(
    args: argparse.Namespace, options: "StepOptions"
) -> "Callable[[Layout, StepOptions], Documents | DividedStep] | None":
    """What packs one step's documents, drawn once, for any layout; None for full windows.

    Args:
        args: Model, lengths and seed.
        options: Window, sequences and policy, which no choice changes.

    Raises:
        SpecError: there is no such policy.
        DataError: lengths that are none.
    """
    if args.lengths is None:
        return None
    from equipoise.balance.packing.pack import ALL_POLICIES, DIVIDES, make_packer, require_policy
    from equipoise.base.nearest import nearest
    from equipoise.cost.curve import counted_curve
    from equipoise.data.stream import DocumentStream, tell_apart
    from equipoise.plan.answer.run_steps import STEPS, middle_step
    from equipoise.sim.divided import DividedStep
    from equipoise.spec.run.spec import PackSpec
    from equipoise.spec.words import read_model
    from equipoise.spec.workload import distribution_names, draw_lengths, read_lengths

    if options.policy not in ALL_POLICIES:
        raise SpecError(
            f'--policy: "{options.policy}" is not one of {", ".join(ALL_POLICIES)}. Nearest: '
            f'"{nearest(options.policy, ALL_POLICIES)}".'
        )
    step_tokens = options.context_tokens * options.step_sequences
    if args.lengths in distribution_names():
        documents = 4096
        lengths = draw_lengths(args.lengths, documents, seed=args.seed)
        while int(lengths.clip(max=options.context_tokens).sum()) < step_tokens:
            documents *= 2
            lengths = draw_lengths(args.lengths, documents, seed=args.seed)
    else:
        lengths = read_lengths(Path(args.lengths))
    stream = DocumentStream(lengths, seed=args.seed, context_tokens=options.context_tokens)
    model = read_model(args.model)
    curve = counted_curve(model)

    def pieces_of(step: int) -> "Pieces":
        return stream.step(step * step_tokens, step_tokens)

    def pack(layout: "Layout", options: "StepOptions") -> "Documents | DividedStep":
        options.count_micro_batches(layout)
        policy = cast("Policy", options.policy)
        require_policy(policy, context=layout.cp, pipeline=layout.pp)
        spec = PackSpec(
            policy=policy,
            context_tokens=options.context_tokens * options.micro_batch,
            step_tokens=step_tokens,
        )
        packer = make_packer(spec, layout.dp, curve, meets_each_turn=layout.meets_each_turn)
        if policy == "delayed":  # as soon as the longest waiting document has been through
            steps = [packer.step(pieces_of(at)) for at in range(spec.max_delay_steps + STEPS)]
            packed = middle_step(model, steps[spec.max_delay_steps :])
        else:
            pieces = pieces_of(0)
            if policy in DIVIDES:
                pieces = tell_apart(pieces, len(lengths))
            packed = packer.step(pieces)
        if policy in DIVIDES:
            return DividedStep.of(packed)
        return [[batch.doc_tokens.tolist() for batch in rank] for rank in packed.ranks]

    return pack
