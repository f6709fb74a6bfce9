"""Let a run obey a plan, and refuse keys that contradict it.

What it decides
    The plan's keys replace only defaults. A key given in run.toml or on the command line must
    agree with the plan; ``layout.dp = "cores"`` agrees with any number. Otherwise the run is
    refused, since only the user knows which of the two is wrong.

Kept true (tests/unit/spec/run/test_obey.py)
    A key has the plan's value and its origin; all contradictions are reported at once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from equipoise.base.errors import LayoutError, PlanError, SpecError
from equipoise.base.shown import printable
from equipoise.spec.model.experts import shares_experts
from equipoise.spec.plan import LOCK
from equipoise.spec.run.keys import DEFAULT, build, keys, toml
from equipoise.spec.run.layout import idle_parts
from equipoise.spec.run.load import judge, nearest_key
from equipoise.spec.run.render import value_of
from equipoise.spec.run.resolve import ResolvedRun, digest_of


def obey(run: ResolvedRun, decided: Mapping[str, Any], command: str) -> ResolvedRun:
    """The run with the keys of a plan.

    Args:
        run: The run of run.toml and flags.
        decided: Dotted keys and their values.
        command: The command that plans again.

    Raises:
        SpecError: names each key given with another value, and both values.
        PlanError: the plan sets what no run.toml can.

    >>> from equipoise.spec.run.load import read_run
    >>> obedient = obey(read_run(None), {"layout.zero": 3}, "equipoise plan run.toml")
    >>> obedient.spec.layout.zero, obedient.origins["layout.zero"]
    (3, 'plan.lock')
    """
    for name, value in decided.items():
        message: str | None = f"no such key. Nearest: {nearest_key(name)}."
        if name in keys():
            _, message = judge(keys()[name], value)
        if message is not None:
            raise PlanError(f'The plan sets {printable(name)}: {message} Plan again: "{command}".')
    values = {name: value_of(run, key) for name, key in keys().items()}
    against = [
        name
        for name, value in decided.items()
        if is_given(run, name) and values[name] not in (value, "cores")
    ]
    if against:
        said = " and ".join(
            f"{name} = {toml(values[name])} ({run.origins[name]})" for name in against
        )
        planned = " and ".join(toml(decided[name]) for name in against)
        it, does = ("it", "contradicts") if len(against) == 1 else ("them", "contradict")
        raise SpecError(
            f"{said} {does} the plan, which says {planned}. Omit {it}, or plan with {it}: "
            f'"{command}".'
        )
    spec = build(values | dict(decided))
    return dataclasses.replace(
        run,
        spec=spec,
        origins=run.origins | dict.fromkeys(decided, LOCK),
        digest=digest_of(spec, run.model),
    )


def is_given(run: ResolvedRun, name: str) -> bool:
    """Whether a key's value was given."""
    return run.origins[name] != DEFAULT.label


def share_experts(run: ResolvedRun, ranks: int) -> ResolvedRun:
    """The run with as many ranks sharing experts as can, if a policy balances them.

    Args:
        run: Whatever ``layout.ep`` it was given stays.
        ranks: All of them.

    Raises:
        LayoutError: no two of the ranks can share them, so that the policy would have no effect; or
            no rows travel that ``layout.parts`` could cut.

    >>> from equipoise.spec.run.load import read_run
    >>> run = read_run(None, [("model.experts", "8"), ("experts.policy", "exact")])
    >>> share_experts(run, 4).spec.layout.ep, share_experts(run, 3).spec.layout.ep
    (4, 3)
    """
    layout, experts = run.spec.layout, run.model.experts
    if run.spec.experts.policy == "fixed" or not experts or is_given(run, "layout.ep"):
        return run
    alike = max(1, ranks // layout.pp // layout.etp)
    policy = run.spec.experts.policy

    def can_share(ep: int) -> bool:
        if policy == "speculative" and ep not in (1, layout.tp):
            return False
        is_even = policy != "eplb" or experts % ep == 0
        return alike % ep == 0 and shares_experts(experts, ep) and is_even

    ep = max(ep for ep in range(1, alike + 1) if can_share(ep))
    if ep == 1 < alike and layout.etp == 1 and policy != "speculative":
        evenly = ", each as many, which eplb needs" if policy == "eplb" else ""
        raise LayoutError(
            f'experts.policy = "{policy}" balances experts between ranks, and no number of the '
            f"{alike} ranks can share {experts} expert{'s' * (experts > 1)}{evenly}. Set "
            f'model.experts to a multiple of {alike}, or experts.policy = "fixed".'
        )
    values = {name: value_of(run, key) for name, key in keys().items()}
    spec = build(values | {"layout.ep": ep})
    if (idle := idle_parts(spec.layout, policy)) is not None:
        raise LayoutError(f"layout.parts = {toml(spec.layout.parts)} {idle}")
    origin = f'experts.policy = "{policy}"'
    return dataclasses.replace(
        run,
        spec=spec,
        origins=run.origins | {"layout.ep": origin},
        digest=digest_of(spec, run.model),
    )
