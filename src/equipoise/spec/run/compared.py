"""Packing policies that one run compares: each step computed under all of them.

What it decides
    Which policies can be compared: those that train the same pieces, so that their gradients are
    equal and one update serves all.

Kept true (tests/unit/spec/run/test_compared.py, tests/multi/train/test_compare.py)
    Every policy that is accepted has the loss and gradient norm of every other.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.spec.catalog import LOSSY, POLICIES
from equipoise.spec.run.resolved import ResolvedFile, read_resolved
from equipoise.spec.run.spec import RunSpec


def compared_specs(spec: RunSpec, policies: Sequence[str]) -> list[RunSpec]:
    """A run's spec under each policy.

    Args:
        spec: The run.
        policies: Names of packing policies.

    Raises:
        SpecError: a policy is unknown, named twice or trains other pieces; or there is only one.
    """
    for policy in policies:
        if policy not in POLICIES:
            raise SpecError(
                f'"{policy}" is not a packing policy to compare. Nearest: '
                f'"{nearest(policy, POLICIES)}".'
            )
        if policies.count(policy) > 1:
            raise SpecError(f'"{policy}" is to be compared with itself. Name each policy once.')
        if POLICIES[policy].lets_wait:
            raise SpecError(
                f'"{policy}" cannot be compared step by step: it lets documents wait for later '
                f"steps, so its steps train other documents than those of other policies."
            )
        if POLICIES[policy].cuts_further:
            raise SpecError(
                f'"{policy}" cannot be compared step by step: it cuts documents to fill its '
                f"windows, so it trains other pieces than other policies."
            )
    if len(policies) < 2:
        raise SpecError(
            f"A comparison needs at least two packing policies, such as in-order,divided; "
            f"{len(policies)} given."
        )
    if spec.pack.cut != "windows":
        raise SpecError(
            f'A comparison needs pack.cut = "windows", so that all policies train the same pieces; '
            f'it is "{spec.pack.cut}". Set it in run.toml, or pass --pack.cut windows.'
        )
    if spec.encoders:
        raise SpecError(
            "Packing policies are compared on text alone, and the run has vision.layers or "
            "audio.layers. Train each policy in a run of its own, without --compare."
        )
    if spec.layout.schedule in LOSSY:
        raise SpecError(
            f'layout.schedule = "{spec.layout.schedule}" leaves stages out, so packs of the same '
            f"pieces have different gradients. Compare policies under another schedule."
        )
    return [
        dataclasses.replace(spec, pack=dataclasses.replace(spec.pack, policy=policy))
        for policy in policies
    ]


def require_same_sides(folder: Path, compare: Sequence[str]) -> None:
    """Refuse to go on with a run that compared other policies, or none.

    Raises:
        SpecError: says what the folder's run compares.
    """
    try:
        begun = read_resolved(folder).compare
    except SpecError:
        return  # no run yet
    if set(begun) == set(compare):
        return
    if not begun:
        raise SpecError(
            f"{folder} holds a run that compares no policies. Choose another folder with --out."
        )
    raise SpecError(
        f"{folder} holds a run that compares {' and '.join(begun)}. Go on with --compare "
        f"{','.join(begun)}, or choose another folder with --out."
    )


def resolved_sides(folder: Path, resolved: ResolvedFile) -> list[tuple[Path, ResolvedFile]]:
    """Each policy's folder within a run's, and the run under it; an ordinary run has one side."""
    if not resolved.compare:
        return [(folder, resolved)]
    return [
        (
            folder / spec.pack.policy,
            dataclasses.replace(
                resolved, spec=spec, origins={**resolved.origins, "pack.policy": "--compare"}
            ),
        )
        for spec in compared_specs(resolved.spec, resolved.compare)
    ]
