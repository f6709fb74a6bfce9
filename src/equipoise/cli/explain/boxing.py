"""``equipoise explain boxing``: how a tensor gets from some placements to others, priced."""

import argparse
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import SpecError
from equipoise.base.units import format_bytes
from equipoise.base.whole import whole_number
from equipoise.cli.console import make_console
from equipoise.cli.explain import asked
from equipoise.cli.table import Column, print_columns

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.schedule.attention.price import LinkPrice
    from equipoise.schedule.boxing.path import BoxingRequest, BoxingSchedule
    from equipoise.schedule.boxing.placement import MeshTensor

HELP = "show the cheapest way to redistribute a tensor over a mesh"

EXAMPLES = """\
examples:
  equipoise explain boxing "S(0), P -> B, S(1)" --mesh 2x4 --shape 4096x4096
  equipoise explain boxing "P, P -> B, B" --mesh 4x8 --cluster h100-sxm:32
  equipoise explain boxing "S(0: 3+0+5) -> S(1)" --mesh 3 --shape 8x6 --json
"""

_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "placements",
        metavar="FROM->TO",
        help="placements before and after: for each axis of the mesh, outermost first, S(dim) "
        "split, S(dim: 3+1) split unevenly, B broadcast, P or P(max) partial",
    )
    parser.add_argument(
        "--mesh",
        default="2x4",
        metavar="NxM",
        help="ranks along each axis, outermost first (default: 2x4)",
    )
    parser.add_argument(
        "--shape",
        default="4096x4096",
        metavar="NxM",
        help="sizes of the tensor (default: 4096x4096)",
    )
    asked.add_link_arguments(
        parser,
        "between two ranks, for all axes of the mesh or for each, as in 10:50,5:450",
        tuple(_BYTES),
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME:N|FILE",
        help="whose links the axes cross, as h100-sxm:64, or a cluster.toml; instead of --link",
    )


def run(args: argparse.Namespace) -> int:
    """Explain the cheapest path, beside others."""
    from equipoise.schedule.boxing.path import plan_boxing
    from equipoise.schedule.boxing.ways import other_ways

    request = _request(args)
    ways = (plan_boxing(request), *other_ways(request))
    asked.answer(
        args,
        rows=lambda: _rows(args, request, ways),
        lines=lambda: _print_lines(ways),
        tables=lambda: _show(args, request, ways),
    )
    return 0


def _print_lines(ways: "tuple[BoxingSchedule, ...]") -> None:
    console = make_console()
    for way in ways:
        console.print(f"{way}; {_summary(way)}.", soft_wrap=True)


def _request(args: argparse.Namespace) -> "BoxingRequest":
    """What the parsed arguments ask for.

    Raises:
        SpecError: text that cannot be read.
        LayoutError: placements, mesh and shape that do not go together.
    """
    from equipoise.schedule.boxing.path import BoxingRequest
    from equipoise.schedule.boxing.placement import MeshTensor, read_placements

    if args.cluster is not None and args.link != asked.LINK:
        raise SpecError(
            f"--link {args.link} and --cluster {args.cluster}: both say what links there are. Give "
            f"one of them."
        )
    before, arrow, after = args.placements.partition("->")
    if not arrow or "->" in after:
        raise SpecError(
            f'"{args.placements}" does not say from where to where. Write the placements before '
            f'and after, as in "S(0), P -> B, S(1)".'
        )
    on = MeshTensor(_sizes("--shape", args.shape), _sizes("--mesh", args.mesh))
    return BoxingRequest(
        on,
        read_placements(before),
        read_placements(after),
        _BYTES[args.dtype],
        _links(args.link, len(on.mesh))
        if args.cluster is None
        else _cluster_links(args.cluster, on),
    )


def _sizes(flag: str, text: str) -> tuple[int, ...]:
    sizes = [size for word in text.split("x") if (size := whole_number(word)) is not None]
    if len(sizes) <= text.count("x"):
        raise SpecError(f'{flag}: "{text}" is not sizes with x between them, as in 2x4.')
    return tuple(sizes)


def _cluster_links(text: str, on: "MeshTensor") -> "tuple[LinkPrice, ...]":
    """Each axis's slowest link that any of its groups crosses, at what it reaches.

    Raises:
        SpecError: no such cluster, or too small a one.
    """
    from equipoise.cost.link import group_of
    from equipoise.schedule.attention.price import LinkPrice
    from equipoise.schedule.boxing.step import groups_along
    from equipoise.spec.cluster.file import read_cluster

    cluster = read_cluster(text)
    if cluster.devices < on.ranks:
        raise SpecError(
            f"--cluster {text} has {cluster.devices:,} devices for a mesh of {on.ranks:,} ranks. "
            f"Give one of {on.ranks:,} or more."
        )
    links = []
    for axis in range(len(on.mesh)):
        crossed = []
        for row in groups_along(on.mesh, (axis,)):
            inside = 0  # so that an axis of one rank has its device's own link
            for level in group_of(cluster, row).levels:
                if int(level.most) > max(inside, len(row) > 1):
                    inside = int(level.most)
                    crossed.append((level.bytes_per_s * level.link.efficiency, level.link))
        rate, link = min(crossed, key=lambda each: each[0])
        links.append(LinkPrice(link.latency_s, rate))
    return tuple(links)


def _links(text: str, axes: int) -> "tuple[LinkPrice, ...]":
    links = tuple(asked.read_link("--link", each) for each in text.split(","))
    if len(links) not in (1, axes):
        raise SpecError(
            f"--link {text}: {len(links)} links for a mesh of {axes} axes. Give one for all, or "
            f"one for each axis, outermost first, as in 10:50,5:450."
        )
    return links * axes if len(links) == 1 else links


def _rows(
    args: argparse.Namespace, request: "BoxingRequest", ways: "tuple[BoxingSchedule, ...]"
) -> dict[str, object]:
    from equipoise.schedule.boxing.exchange import count_copies
    from equipoise.schedule.boxing.placement import write_placements

    return {
        "before": write_placements(request.before),
        "after": write_placements(request.after),
        "shape": request.on.shape,
        "mesh": request.on.mesh,
        "dtype": args.dtype,
        "links": [
            {"latency_s": each.latency_s, "bytes_per_s": each.bytes_per_s} for each in request.links
        ],
        "ways": [
            {
                "name": way.name,
                "predicted_s": way.seconds,
                "sent_bytes": way.sent_bytes,
                "steps": [
                    {
                        "name": each.step.words,
                        "axes": each.step.axes,
                        "after": write_placements(each.step.after),
                        "predicted_s": each.seconds,
                        "sent_bytes": each.sent_bytes,
                        "most_sent_bytes": each.most_bytes,
                        "messages": each.messages,
                        "packed": count_copies(way.on, each.step, rank=0),
                    }
                    for each in way.steps
                ],
            }
            for way in ways
        ],
    }


def _show(
    args: argparse.Namespace, request: "BoxingRequest", ways: "tuple[BoxingSchedule, ...]"
) -> None:
    from equipoise.schedule.boxing.placement import write_placements

    console, (best, *others) = make_console(), ways
    on = request.on
    size = request.element_bytes
    for each in on.shape:
        size *= each
    console.print(
        f"{write_placements(request.before)} -> {write_placements(request.after)}: "
        f"{'x'.join(map(str, on.shape))} {args.dtype} ({format_bytes(size)}) on a mesh of "
        f"{'x'.join(map(str, on.mesh))} ranks."
    )
    if not best.steps:
        console.print("There is nothing to do.")
        return
    console.print(f"\nThe cheapest path: {_summary(best)}.")
    _show_steps(console, best)
    if others:
        console.print("Other ways:")
        _show_others(console, best, others)
    console.print(
        "a rank, all ranks: bytes sent, by the rank that sends most and by all. packed: rank 0's "
        "messages that are not contiguous or are added, and the copies that takes. Times are "
        f"predicted, not measured, for {_assumed(request)} (assumed); packing and adding are not "
        "priced.",
        style="dim",
    )


def _show_steps(console: "Console", best: "BoxingSchedule") -> None:
    from equipoise.schedule.boxing.exchange import count_copies
    from equipoise.schedule.boxing.placement import write_placements

    columns = (
        Column("step", is_left=True, wraps=12),
        Column("axes", is_left=True, wraps=4),
        Column("then", is_left=True, wraps=8),
        Column("a rank", goes=3),
        Column("all ranks"),
        Column("messages", goes=2),
        Column("packed", goes=1),
        Column("predicted"),
    )
    rows = []
    for each in best.steps:
        pieces, copies = count_copies(best.on, each.step, rank=0)
        rows.append(
            (
                each.step.words,
                ", ".join(map(str, each.step.axes)),
                write_placements(each.step.after),
                format_bytes(each.most_bytes),
                format_bytes(each.sent_bytes),
                f"{each.messages:,}",
                f"{pieces} in {copies}" if pieces else "",
                _micros(each.seconds),
            )
        )
    print_columns(console, columns, rows, **_style())


def _show_others(
    console: "Console", best: "BoxingSchedule", others: "list[BoxingSchedule]"
) -> None:
    columns = (
        Column("way", is_left=True, wraps=8),
        Column("steps", is_left=True, wraps=14),
        Column("all ranks", goes=1),
        Column("predicted"),
        Column("over cheapest"),
    )
    rows = []
    for way in others:
        over = f"{way.seconds / best.seconds:.2f}x" if best.seconds else ""
        rows.append(
            (
                way.name,
                ", ".join(each.step.words for each in way.steps),
                format_bytes(way.sent_bytes),
                _micros(way.seconds),
                "the same" if way.steps == best.steps else over,
            )
        )
    print_columns(console, columns, rows, **_style())


def _style() -> dict[str, Any]:
    from rich import box

    return {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 2, 0, 0)}


def _summary(way: "BoxingSchedule") -> str:
    steps = len(way.steps)
    return (
        f"{steps} step{'s' * (steps != 1)}, predicted {_micros(way.seconds)}, "
        f"{format_bytes(way.sent_bytes)} sent by all ranks"
    )


def _micros(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us"


def _assumed(request: "BoxingRequest") -> str:
    words = [f"{1e6 * e.latency_s:g} us and {e.bytes_per_s / 1e9:.4g} GB/s" for e in request.links]
    if len(set(words)) == 1:
        return f"links of {words[0]}"
    return "links of " + ", ".join(f"{word} along axis {axis}" for axis, word in enumerate(words))
