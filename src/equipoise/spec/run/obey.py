"""A run that obeys a plan: what the plan decided stands, and who says otherwise is told.

What it decides
    The keys of a plan take the place of defaults alone. A key that somebody gave, in run.toml or
    on the command line, stands if it agrees; ``layout.dp = "cores"`` is no number and agrees with
    any. Everything else refuses the run: whoever gives both wants to know which is wrong.

Kept true (tests/unit/spec/run/test_obey.py)
    A key has the plan's value and says that it is the plan's; contradictions are told at once.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from equipoise.base.digest import digest
from equipoise.base.errors import SpecError
from equipoise.spec.plan import LOCK
from equipoise.spec.run.keys import DEFAULT, build, keys, toml
from equipoise.spec.run.render import value_of
from equipoise.spec.run.resolve import ResolvedRun


def obey(run: ResolvedRun, decided: Mapping[str, Any], command: str) -> ResolvedRun:
    """The run with the keys of a plan.

    Args:
        run: As run.toml and flags describe it.
        decided: Dotted keys and their values.
        command: That plans again.

    Raises:
        SpecError: names each key that was given another value, and both values.

    >>> from equipoise.spec.run.load import read_run
    >>> found = obey(read_run(None), {"layout.zero": 3}, "equipoise plan run.toml")
    >>> found.spec.layout.zero, found.origins["layout.zero"]
    (3, 'plan.lock')
    """
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
            f"{said} {does} the plan, which says {planned}. Leave {it} out, or plan with {it}: "
            f'"{command}".'
        )
    spec = build(values | dict(decided))
    return dataclasses.replace(
        run,
        spec=spec,
        origins=run.origins | dict.fromkeys(decided, LOCK),
        digest=digest({"spec": spec, "model": run.model}),
    )


def is_given(run: ResolvedRun, name: str) -> bool:
    """Whether somebody asked for a key's value."""
    return run.origins[name] != DEFAULT.label
