"""What ``equipoise simulate`` prints of several policies: gains, bounds, and their costs."""

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns
from equipoise.sim.policies.compare import PolicyComparison, PolicyRow

_COLUMNS = (
    Column("policy", is_left=True),
    Column("layout", is_left=True, goes=3, wraps=14),
    Column("step"),
    Column("gain"),
    Column("at most", goes=4),
    Column("GiB", goes=5),
    Column("delay", goes=6),
    Column("bubble", goes=1),
    Column("travel", goes=2),
)

_TRAVEL = ("context traffic", "data traffic", "parameter traffic")


def print_policies(answer: PolicyComparison, title: str, *, is_quiet: bool) -> None:
    """The best policy in one sentence, and unless quiet all of them in a table.

    Args:
        answer: Policies on equal content.
        title: Model and cluster.
        is_quiet: Print the sentence alone.
    """
    console = make_console()
    fitting = [row for row in answer.rows if row.fits] or list(answer.rows)
    best = min(fitting, key=lambda row: row.seconds)
    console.print(
        f"{title}: {best.policy} takes {format_seconds(best.seconds / answer.steps)} a step of "
        f"{answer.tokens_per_step:,} tokens, {best.gain:.2f} times as fast as plain packing "
        f"(no packing of its kind is more than {best.most_gain:.2f} times as fast).",
        soft_wrap=True,
    )
    if is_quiet:
        return
    rows = [_cells(row, answer) for row in answer.rows]
    print_columns(console, _COLUMNS, rows, sections={0})
    console.print(
        f"Every policy trains the same {answer.documents:,} pieces of {answer.steps} steps: "
        f"{best.tokens:,} tokens, {best.useful_flop:.4g} useful FLOP. plain fills windows in "
        f"order, or packs whole documents by tokens, cuts each micro-batch in chunks from both its "
        f"ends, and gathers all keys unless --context-strategy says otherwise; in-order differs "
        f"from it in context sharding alone. at most: the gain of the bound. delay: steps that a "
        f"token waits, mean / most; without it each step has the gradient of plain.",
        soft_wrap=True,
    )
    for row in answer.rows:
        if row.change and row.fits:
            console.print(f"{row.policy} fits with {row.change}.", soft_wrap=True)
        elif not row.fits:
            console.print(f"{row.policy} does not fit: {row.memory_gib:.1f} GiB.", soft_wrap=True)


def _cells(row: PolicyRow, answer: PolicyComparison) -> tuple[str, ...]:
    delay = f"{row.delay_mean_steps:.2f} / {row.delay_most_steps}"
    return (
        row.policy,
        row.layout,
        format_seconds(row.seconds / answer.steps),
        f"{row.gain:.2f}",
        f"{row.most_gain:.2f}",
        f"{row.memory_gib:.1f}",
        "0" if row.has_same_steps else delay,
        f"{row.terms.get('pipeline bubble', 0.0) / row.seconds:.0%}",
        f"{sum(row.terms.get(name, 0.0) for name in _TRAVEL) / row.seconds:.0%}",
    )
