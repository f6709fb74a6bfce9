"""What several verbs print of plans and priced steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns
from equipoise.spec.plan import MEASURED_S, Candidate, Plan
from equipoise.spec.run.keys import toml

_WHY = "where it goes, what others lose by"
MEMORY_ERROR = 0.05
"""Mean of 96 published rows (``bench/published/memory.py``, 2026-11-21)."""
_LEAST_SHARE = 0.005
"""The least share of a step that is worth a word."""
_NO_INTERVAL = (
    "No interval: steps of this machine are priced from its own curves. equipoise calibrate says "
    "how sure each of them is."
)


def print_plan(plan: Plan, *, is_quiet: bool) -> None:
    """The best and what was left behind; unless quiet, the reasons."""
    console = make_console()
    price = plan.best.price
    console.print(
        f"{say(plan.best)}: {_step(price)}, "
        f"{price['tokens_per_s_per_device']:,.0f} tokens/s a device, "
        f"{price['tflops_per_device']:.3g} TFLOP/s ({price['mfu']:.1%} MFU), "
        f"{price['memory_gib_max']:.1f} GiB of {price['capacity_gib']:.1f}"
        f"{host_sentence(price)}.",
        soft_wrap=True,
    )
    if is_quiet:
        return
    if plan.without_offload is not None:
        step_s, gib = (plan.without_offload[name] for name in ("step_s", "memory_gib_max"))
        console.print(
            f"Without offloading this layout takes {format_seconds(step_s)} a step and needs "
            f"{gib:.1f} GiB of {price['capacity_gib']:.1f}.",
            soft_wrap=True,
        )
    console.print(
        f"{plan.listed:,} choices, {plan.priced} {_looked_at(plan)}",
        soft_wrap=True,
    )
    for line in doubt_lines(price):
        console.print(line, soft_wrap=True)
    usd = price["usd_per_million_tokens"]
    money = "no public price" if usd is None else f"${usd:,.2f} a million tokens"
    console.print(
        f"{price['energy_j_per_token']:.3g} J a token, {money}. TFLOP/s and MFU count masked "
        f"pairs, too, as arXiv:2205.05198 does; without them the MFU is {price['useful_mfu']:.1%}.",
        soft_wrap=True,
    )
    every = (plan.best, *plan.runners_up)
    columns = (
        Column(""),
        Column("layout", is_left=True, wraps=26),
        Column("step"),
        Column("slower by"),
        Column("TFLOP/s", goes=2),
        Column("MFU", goes=3),
        Column("GiB"),
        Column(_WHY, is_left=True, goes=1, wraps=24),
    )
    rows = []
    for place, each in enumerate(every, start=1):
        slower = _taken_s(each.price) / _taken_s(price) - 1
        rows.append(
            (
                str(place),
                say(each),
                format_seconds(_taken_s(each.price)),
                f"{slower:.1%}" if place > 1 else "",
                f"{each.price['tflops_per_device']:.3g}",
                f"{each.price['mfu']:.1%}",
                f"{each.price['memory_gib_max']:.1f}",
                why(each) if place > 1 else _where(each),
            )
        )
    print_columns(console, columns, rows, box=None, pad_edge=False)
    if "layers" in plan.best.words:
        console.print(f"Layers of the best: {plan.best.words['layers']}.", soft_wrap=True)
    stages = plan.best.price["stages"]
    if len(set(stages["nodes"])) > 1:
        console.print(f"Its stages stand on: {', '.join(stages['nodes'])}.", soft_wrap=True)
    if plan.nodes:
        order = " ".join(map(str, plan.nodes))
        console.print(f"Nodes in the order of their places: {order}.", soft_wrap=True)
    if tight := tight_sentence(plan):
        console.print(tight, soft_wrap=True)
    for remark in plan.remarks:
        console.print(remark, soft_wrap=True)
    for wall in plan.wall[:1]:
        console.print(
            f"Nearest wall: {wall.grows} from {wall.before:,} to {wall.after:,} needs "
            f"{wall.memory_gib:.1f} GiB of {wall.capacity_gib:.1f}"
            f"{' in host memory' if wall.of_host else ''}.",
            soft_wrap=True,
        )
    if plan.best.keys:
        said = ", ".join(f"{name} = {toml(value)}" for name, value in plan.best.keys.items())
        console.print(f"In run.toml: {said}.", soft_wrap=True)
    if plan.best.stages is not None:
        console.print(f"Its stages: {plan.best.stages}.", soft_wrap=True)
    if plan.flip is not None:
        console.print(
            f"What would flip it: {plan.flip.term} {plan.flip.times:.2f} times as slow makes "
            f"{plan.flip.winner} the best.",
            soft_wrap=True,
        )


def doubt_lines(price: Mapping[str, Any]) -> list[str]:
    """How sure a price is: its interval, and what was measured under load or only in part.

    >>> doubt_lines({"interval": {"share": 0.8, "low_s": 1.5, "high_s": 2.5}, "doubts": ["Hm."]})
    ['80% of such steps take between 1.50 s and 2.50 s.', 'Hm.']
    """
    lines = []
    if (sure := price.get("interval")) is not None:
        low, high = (format_seconds(sure[name]) for name in ("low_s", "high_s"))
        lines.append(f"{sure['share']:.0%} of such steps take between {low} and {high}.")
    return [*lines, *price.get("doubts", ())]


def print_interval(price: Mapping[str, Any]) -> None:
    """What each curve adds to the step and to its interval.

    Args:
        price: In the keys of ``equipoise simulate --json``.
    """
    console = make_console()
    if "interval" not in price:
        console.print(_NO_INTERVAL, soft_wrap=True)
        return
    if not price["spreads"]:  # of this machine, where one spread is known of whole steps
        return
    console.print("What makes the step's time unsure, largest first:")
    columns = (
        Column("curve", is_left=True),
        Column("seconds"),
        Column("share"),
        Column("+-"),
        Column("what it priced", is_left=True, wraps=20),
    )
    rows = [
        (
            each["curve"],
            format_seconds(each["seconds"]),
            f"{each['seconds'] / price['step_s']:.1%}",
            format_seconds(each["spread_s"]),
            ", ".join(each["terms"]),
        )
        for each in price["spreads"]
    ]
    print_columns(console, columns, rows, box=None, pad_edge=False)
    console.print(
        "+- is one spread of the curve on published steps; waiting for other stages counts as what "
        "they compute.",
        soft_wrap=True,
    )


def refused_sentence(refused: int) -> str:
    """What became of requests that no pool can hold.

    >>> refused_sentence(1)
    '1 request was refused: it may need more pages than there are.'
    """
    if refused == 1:
        return "1 request was refused: it may need more pages than there are."
    return f"{refused:,} requests were refused: they may need more pages than there are."


def _taken_s(price: Mapping[str, Any]) -> float:
    """Seconds of a step: measured if it was, else planned."""
    return float(price.get(MEASURED_S, price["step_s"]))


def _step(price: Mapping[str, Any]) -> str:
    planned = format_seconds(price["step_s"])
    if MEASURED_S not in price:
        return f"{planned} a step"
    return f"{format_seconds(price[MEASURED_S])} a step, measured, and planned to take {planned}"


def _looked_at(plan: Plan) -> str:
    if MEASURED_S in plan.best.price:
        return "trained for some steps each."
    if plan.gap is None or not plan.bound_s:
        return "replayed. The search has no lower bound, so the gap is not known."
    return (
        f"replayed. {_whose(plan)} can be faster than {format_seconds(plan.bound_s)}: a gap of "
        f"{plan.gap:.1%} at most."
    )


def tight_sentence(plan: Plan) -> str:
    """What to say of a best that fills its device to within the forecast's own error.

    >>> price = {"step_s": 10.0, "memory_gib_max": 78.5, "capacity_gib": 78.7}
    >>> best, other = Candidate({}, price, {}), Candidate({}, price | {"memory_gib_max": 60.0}, {})
    >>> plan = Plan({}, best, (other,), 0, 0, 1, 1, (), None, (), {}, {})
    >>> tight_sentence(plan)
    'Tight: 0.2 GiB stay free, and memory forecasts are 5% off in the mean; 2 leaves 18.7 GiB.'
    """

    def free(each: Candidate) -> float:
        return float(each.price["capacity_gib"] - each.price["memory_gib_max"])

    least = MEMORY_ERROR * float(plan.best.price["capacity_gib"])
    if free(plan.best) >= least:
        return ""
    said = (
        f"Tight: {free(plan.best):.1f} GiB stay free, and memory forecasts are "
        f"{MEMORY_ERROR:.0%} off in the mean"
    )
    for place, each in enumerate(plan.runners_up, start=2):
        if free(each) >= least:
            return f"{said}; {place} leaves {free(each):.1f} GiB."
    return f"{said}."


def print_sources(
    extrapolated: Sequence[str], sources: Mapping[str, str], *, is_listed: bool
) -> None:
    """What was read beyond what anyone measured; where each number comes from, if that is asked."""
    console = make_console()
    if extrapolated:
        said = ", ".join(extrapolated)
        line = f"Not measured on this device at these sizes: {said}."
        console.print(line, style="dim", soft_wrap=True)
    if is_listed:
        for line in _source_lines(sources):
            console.print(line, style="dim", soft_wrap=True)
    else:
        console.print("--sources says where each number comes from.", style="dim")


def say(candidate: Candidate) -> str:
    """A choice in one line."""
    words = candidate.words
    # A run's micro-batches are its packer's.
    beside = [] if candidate.keys else [f"micro-batch {words['micro-batch']}"]
    parts = [words["layout"], *beside, *([words["policy"]] if "policy" in words else [])]
    parts += [f"offload {words['offload']}"] if "offload" in words else []
    parts += [words[name] for name in ("order", "schedule", "context-strategy") if name in words]
    if "layers" in words:
        return " ".join([*parts, f"{len(set(_strategies(words)))} strategies of layers"])
    if words["recompute"] != "none":
        parts.append(f"recompute {words['recompute']}")
    return " ".join(parts)


def _strategies(words: Mapping[str, str]) -> list[str]:
    """The strategy of each run of layers."""
    return [run.partition(":")[2] for run in words["layers"].split()]


def _whose(plan: Plan) -> str:
    return "None with all layers alike" if "layers" in plan.best.words else "None"


def why(candidate: Candidate) -> str:
    """The terms by which a runner-up loses most, and what it gains most by.

    >>> apart = {"products": 0.5, "host": 0.0, "optimizer": -0.25}
    >>> why(Candidate({}, {"step_s": 10.0}, apart))
    'products +500.0 ms, optimizer -250.0 ms'
    """
    least = 1e-3 * float(candidate.price["step_s"])
    ordered = list(candidate.loses_by.items())
    loses = [each for each in ordered if each[1] > least][:2]
    gains = [each for each in reversed(ordered) if each[1] < -least][:1]
    said = [f"{name} +{format_seconds(value)}" for name, value in loses]
    said += [f"{name} -{format_seconds(-value)}" for name, value in gains]
    return ", ".join(said) or "the same terms"


def _where(candidate: Candidate) -> str:
    step_s = float(candidate.price["step_s"])
    terms = sorted(candidate.price["terms"].items(), key=lambda each: -each[1])[:3]
    shares = ((name, value / step_s) for name, value in terms)
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= _LEAST_SHARE)


def host_sentence(row: Mapping[str, Any]) -> str:
    """What a device's share of its host holds; nothing where nothing is offloaded."""
    if not row["host_memory_gib_max"]:
        return ""
    return (
        f" and {row['host_memory_gib_max']:.1f} GiB in its host's memory of "
        f"{row['host_capacity_gib']:.1f}"
    )


def _source_lines(sources: Mapping[str, str]) -> list[str]:
    """Names of one source on one line.

    >>> _source_lines({"peaks": "a datasheet", "price": "a list", "power_w": "a datasheet"})
    ['Sources', '  peaks, power w: a datasheet', '  price: a list']
    """
    of_source: dict[str, list[str]] = {}
    for name, source in sources.items():
        of_source.setdefault(source, []).append(name.replace("_", " "))
    return ["Sources", *(f"  {', '.join(names)}: {each}" for each, names in of_source.items())]
