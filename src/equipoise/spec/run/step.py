"""How a step's tokens become micro-batches: gradient accumulation, in tokens."""

from equipoise.spec.run.spec import RunSpec


def describe_step(spec: RunSpec, ranks: int) -> str:
    """A sentence on the micro-batches of a step.

    Args:
        spec: Packing and layout.
        ranks: All ranks of the run.

    >>> describe_step(RunSpec(), 2).partition(":")[0]
    'A step is 32,768 tokens'
    """
    size, most = spec.pack.step_tokens, spec.pack.most_tokens
    data_ranks = max(1, ranks // spec.layout.sharing)
    share = size / data_ranks
    least = -(-size // (data_ranks * most))
    groups = f"{data_ranks:,} data-parallel ranks" if data_ranks > 1 else "one data-parallel rank"
    average = f"{share:,.0f}" if share >= 10 else f"{share:.2g}"
    each = f", {average} each on average" if data_ranks > 1 else ""
    batches = f"{least:,} micro-batches" if least > 1 else "one micro-batch"
    return (
        f"A step is {size:,} tokens: {groups}{each}, in {batches} or more of at most {most:,}; "
        "their gradients are summed before one update."
    )
