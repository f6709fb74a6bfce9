"""The documents of one step, drawn from a distribution or a list of lengths and packed by a policy.

What it decides
    Which step of a policy stands for all: the first, and under ``delayed``, where documents wait
    for later steps, one of median work among the first that no longer wait for the run to begin.
    A policy that weighs documents prices their tokens with the experts of the fullest rank that
    shares them in this layout, for which all others wait.

Kept true (tests/unit/cli/plan/test_policy.py, tests/unit/sim/test_request.py)
    The same lengths and seed give the same packs for any order of layouts.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.balance.packing.pack import make_packer
from equipoise.balance.packing.turns import require_policy
from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.shown import shown
from equipoise.cost.curve import counted_curve
from equipoise.cost.step.request import StepOptions
from equipoise.cost.work import layer_pairs, useful_flop
from equipoise.data.stream import DocumentStream, tell_apart
from equipoise.sim.divided import DividedStep
from equipoise.sim.step import Documents
from equipoise.spec.catalog import POLICIES
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec
from equipoise.spec.workload import (
    distribution_names,
    draw_lengths,
    listed_lengths,
    read_lengths,
)

MOST_TOKENS = 2**31 - 1
"""Attention kernels count a document's tokens in int32."""

STEPS = 9
"""Steps among which the one of median work stands for all; odd, so that one is the median."""

StepPacker = Callable[[Layout, StepOptions], Documents | DividedStep]


def middle_step(model: ModelSpec, steps: Sequence[PackedStep]) -> PackedStep:
    """The step of median work, among steps whose documents are whole.

    Args:
        model: What a document's work is counted for.
        steps: An odd number of them.
    """
    work = []
    for step in steps:
        lengths = np.concatenate([batch.doc_tokens for batch in step])
        work.append(useful_flop(model, int(lengths.sum()), layer_pairs(model, lengths)))
    return steps[int(np.argsort(work, kind="stable")[len(work) // 2])]


def step_packer(model: ModelSpec, lengths: str | ArrayLike, options: StepOptions) -> StepPacker:
    """A function that packs one step's documents for any layout.

    Args:
        model: What a document's work is counted for.
        lengths: A distribution's name, a file, or lengths [tokens], also as text: 3000,40,900.
        options: Window, sequences, policy, seed and loads of experts, which no choice changes.

    Raises:
        SpecError: there is no such policy.
        DataError: the lengths cannot be read.
    """
    if options.policy not in POLICIES:
        raise SpecError(
            f'policy: "{options.policy}" is not one of {", ".join(POLICIES)}. Nearest: '
            f'"{nearest(options.policy, POLICIES)}".'
        )
    step_tokens = options.context_tokens * options.step_sequences
    doc_tokens = read_documents(lengths, options.context_tokens, step_tokens, seed=options.seed)
    stream = DocumentStream(doc_tokens, seed=options.seed, context_tokens=options.context_tokens)

    def pieces_of(step: int) -> Pieces:
        return stream.step(step * step_tokens, step_tokens)

    def pack(layout: Layout, options: StepOptions) -> Documents | DividedStep:
        traits = POLICIES[options.policy]
        if not traits.divides:  # parts of documents are shared out in any number
            options.count_micro_batches(layout)
        require_policy(options.policy, context=layout.cp, pipeline=layout.pp)
        spec = PackSpec(
            policy=options.policy,
            context_tokens=options.context_tokens * options.micro_batch,
            step_tokens=step_tokens,
        )
        curve = counted_curve(model, expert_skew=options.skew_of(layout) if layout.ep > 1 else 1.0)
        packer = make_packer(spec, layout.dp, curve, meets_each_turn=layout.meets_each_turn)
        if traits.lets_wait:  # as soon as the longest waiting document has been through
            steps = [packer.step(pieces_of(at)) for at in range(spec.max_delay_steps + STEPS)]
            packed = middle_step(model, steps[spec.max_delay_steps :])
        else:
            pieces = pieces_of(0)
            if traits.divides:
                pieces = tell_apart(pieces, len(doc_tokens))
            packed = packer.step(pieces)
        if traits.divides:
            return DividedStep.of(packed)
        return [[batch.doc_tokens.tolist() for batch in rank] for rank in packed.ranks]

    return pack


def require_documents(documents: Documents) -> None:
    """Refuse what is not lengths of documents, in micro-batches of ranks.

    Raises:
        SpecError: says what is wrong.
    """
    try:
        batches = [list(batch) for row in documents for batch in list(row) or [[]]]
    except TypeError:
        raise SpecError(
            "documents is not a list of ranks, of micro-batches, of lengths. Give all three, as "
            "in [[[4096, 100]]]."
        ) from None
    if not batches or not all(batches):
        raise SpecError("documents has a rank or a micro-batch with nothing in it. Fill it.")
    for size in itertools.chain(*batches):
        if not isinstance(size, int | np.integer) or not 1 <= size <= MOST_TOKENS:
            raise SpecError(
                f"documents has a length of {shown(size)}. Give whole numbers of 1 to "
                f"{MOST_TOKENS:,}."
            )


def read_documents(
    lengths: str | ArrayLike, context_tokens: int, most_tokens: int, *, seed: int
) -> NDArray[np.int64]:
    """Lengths as given, as read from a file, or enough draws of a distribution.

    Args:
        lengths: A distribution's name, a file, or lengths [tokens], also as text: 3000,40,900.
        context_tokens: Window; longer documents are cut.
        most_tokens: For how many tokens draws have to be enough.
        seed: Of the draws.

    Raises:
        DataError: the lengths cannot be read.
    """
    if not isinstance(lengths, str):
        return np.asarray(lengths)
    if (listed := listed_lengths(lengths)) is not None:
        return np.array(listed)
    if lengths not in distribution_names():
        return read_lengths(Path(lengths))
    documents = 4096
    drawn = draw_lengths(lengths, documents, seed=seed)
    while int(drawn.clip(max=context_tokens).sum()) < most_tokens:
        documents *= 2
        drawn = draw_lengths(lengths, documents, seed=seed)
    return drawn
