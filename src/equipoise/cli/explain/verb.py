"""``equipoise explain``: who computes and sends what, and when, before anything runs."""

import sys

from equipoise.base.errors import SpecError

HELP = "show who computes or sends what: attention, experts, pipelines, tables; needs no torch"

VERBS = {
    "attention": "show which rank holds, sends and computes what in attention over several ranks",
    "pipeline": "show the schedule of a pipeline's step: when each stage runs which micro-batch",
    "boxing": "show the cheapest way to redistribute a tensor over a mesh",
    "traffic": "show what concurrent rings get of a network: hashed paths beside planned ones",
    "experts": "show which rank computes which expert's rows, before and after balancing",
    "items": "show which rank encodes which images and sound of a run, before and after",
    "tables": "show where embedding tables lie, and what each rank looks up and sends",
    "towers": "show which columns of a recommender belong in one tower, after an epoch of it",
    "plan": "show why a plan.lock says what it says, and what was measured of it",
}

_OLD = {
    "--attention": "attention",
    "--schedule": "pipeline",
    "--boxing": "boxing",
    "--experts": "experts",
    "--tables": "tables",
    "--plan": "plan",
}


def modernize(argv: list[str]) -> list[str]:
    """A command line with a flag of 0.1 in place of the verb, as it is written today.

    Raises:
        SpecError: flags for several verbs.
    """
    if argv and argv[0] in VERBS:
        return argv
    old = [at for at, word in enumerate(argv) if word.partition("=")[0] in _OLD]
    if not old:
        return argv
    flags = [argv[at].partition("=")[0] for at in old]
    if len(old) > 1:
        raise SpecError(
            f"equipoise explain: {' and '.join(flags)} are verbs of their own. Give one: "
            f"{' or '.join(f'equipoise explain {_OLD[flag]}' for flag in flags)}."
        )
    verb = _OLD[flags[0]]
    value = argv[old[0]].partition("=")[2]
    sys.stderr.write(
        f"equipoise explain {flags[0]} is now equipoise explain {verb}; 0.2 drops the old form.\n"
    )
    return [verb, *argv[: old[0]], *[value][: bool(value)], *argv[old[0] + 1 :]]
