"""A training step in closed form, as Calculon prices one, on the two machines that it ships.

A block is a list of operations with FLOP and bytes; an operation takes its FLOP over a rate and
then its bytes over another, each rate a step function of the size. Collectives take a latency and
bytes over a share of one link. The pipeline's bubble is ``(p - 1)`` chunks, whatever the schedule.

Written from the paper (M. Isaev, N. McDonald, L. Dennison, R. Vuduc: Calculon, SC 2023, sections 3
and 4); the rates are those of its files ``systems/a100_80g.json`` and ``h100_80g_nvl8.json``
(github.com/calculon-ai/calculon at 4f81f02, Apache-2.0). Only the last chunk's part of its
gradient overlap is here. On the eight steps of arXiv:2205.05198, table 5, these forms are within
2.1% of what its own program prints.

It has no vocabulary, grouped keys, gated feed-forwards, experts, context parallelism, ZeRO 2 and 3
or split backwards: steps with those are refused, not approximated.
"""

from dataclasses import dataclass

from bench.published.rows import Row
from equipoise.cost.step.request import StepOptions

Rates = tuple[tuple[float, float], ...]
"""Share of the peak that is reached from each size up, largest size first."""

_MATRIX: Rates = ((128e9, 0.95), (16e9, 0.9), (1e9, 0.6), (0, 0.1))
_VECTOR: Rates = ((16e9, 0.95), (1e9, 0.5), (0, 0.1))
_MEMORY: Rates = ((100e6, 0.9), (10e6, 0.75), (1e6, 0.6), (0, 0.3))
_BYTES = 2
"""Size of one element."""


@dataclass(frozen=True, slots=True)
class Net:
    """One of a machine's two networks."""

    bytes_per_s: float
    efficiency: float
    latency_s: float
    scalars: dict[str, float]
    """Bytes that an operation moves, over the bytes of its tensor."""
    leaves_own: bool
    """Whether a rank's own part does not move."""

    def time(self, operation: str, size: float, ranks: int) -> float:
        """Seconds of one operation; none on one rank."""
        if ranks < 2:
            return 0.0
        moved = size * self.scalars[operation]
        if operation != "p2p" and self.leaves_own:
            moved *= (ranks - 1) / ranks
        return self.latency_s + moved / (self.bytes_per_s * self.efficiency)


@dataclass(frozen=True, slots=True)
class Box:
    """A machine of Calculon's."""

    matrix_flop: float
    vector_flop: float
    memory_bytes: float
    node: Net
    network: Net


_HALVES = {"p2p": 1.0, "reduce_scatter": 1.5, "all_gather": 1.5}
_PLAIN = {"p2p": 1.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_reduce": 1.0}
BOXES = {
    "a100-80": Box(
        312e12,
        78e12,
        2048e9,
        Net(300e9, 0.6, 1e-6, {**_HALVES, "all_reduce": 2.0}, True),
        Net(25e9, 0.9, 2e-6, _PLAIN, True),
    ),
    "h100-sxm": Box(
        1000e12,
        120e12,
        3072e9,
        Net(450e9, 0.6, 1e-6, {**_HALVES, "all_reduce": 1.0}, False),
        Net(50e9, 0.9, 2e-6, _PLAIN, True),
    ),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """FLOP and elements of forward, gradient of the input and gradient of the weights."""

    flop: tuple[float, float, float]
    elements: tuple[float, float, float]
    weights: float = 0.0
    is_matrix: bool = False
    is_core: bool = False
    """Whether it is attention's core, which selective recomputation computes again."""


def covers(row: Row, options: StepOptions) -> bool:
    """Whether Calculon can describe the step."""
    model, layout = row.model, row.layout
    return (
        row.cluster.partition(":")[0] in BOXES
        and not model.gated
        and not model.experts
        and model.kv_heads == model.heads
        and layout.cp == 1
        and layout.zero <= 1
        and options.precision == "bf16"
        and options.schedule in ("1f1b", "interleaved")
        and options.recompute in ("none", "attention", "full")
    )


def _linear(rows: float, wide: float, out: float) -> Operation:
    flop, weights = 2 * rows * wide * out, wide * out
    moved = rows * wide + rows * out + weights
    return Operation((flop,) * 3, (moved,) * 3, weights, is_matrix=True)


def _pointwise(size: float, forward: float, backward: float, moved: float) -> Operation:
    return Operation((forward * size, backward * size, 0), (moved * size, moved * size, 0))


def _fork(size: float, users: int) -> Operation:
    return Operation((0, users * size, 0), (0, (users + 1) * size, 0))


def _norm(size: float, hidden: int) -> Operation:
    moved = 2 * size + 2 * hidden
    return Operation((9 * size, 14 * size, 2 * size), (moved,) * 3, 2 * hidden)


def _product(batch: float, rows: float, inner: float, columns: float, *, core: bool) -> Operation:
    flop = 2 * batch * rows * inner * columns
    moved = batch * (rows * inner + inner * columns + rows * columns)
    return Operation((flop, 2 * flop, 0), (moved, moved, 0), is_matrix=True, is_core=core)


def _block(row: Row, options: StepOptions) -> list[Operation]:
    model, tp, batch, seq = row.model, row.layout.tp, options.micro_batch, options.context_tokens
    tokens, hidden, ffn = batch * seq, model.hidden, model.ffn
    whole = tokens * hidden
    beside = whole / tp if options.stack.sequence_parallel else whole
    heads = batch * model.heads / tp
    scores = heads * seq * seq
    each = hidden / model.heads
    core = [
        _product(heads, seq, each, seq, core=True),
        Operation((5 * scores, 8 * scores, 0), (2 * scores, 2 * scores, 0), is_core=True),
        Operation((scores, scores, 0), (2.5 * scores, 2.5 * scores, 0), is_core=True),
        _product(heads, seq, seq, each, core=False),
    ]
    after = [
        _pointwise(beside, 1, 1, 2.5),
        Operation((beside, 2 * beside, 0), (3 * beside,) * 2 + (0,)),
    ]
    return [
        _fork(beside, 2),
        _norm(beside, hidden),
        _fork(whole, 3),
        *[_linear(tokens, hidden, hidden / tp) for _ in range(3)],
        *core,
        _linear(tokens, hidden / tp, hidden),
        *after,
        _fork(beside, 2),
        _norm(beside, hidden),
        _linear(tokens, hidden, ffn / tp),
        _pointwise(tokens * ffn / tp, 8, 13, 2),
        _linear(tokens, ffn / tp, hidden),
        *after,
    ]


def _share(rates: Rates, size: float) -> float:
    return next(share for least, share in rates if size >= least)


def _takes(box: Box, flop: float, moved: float, *, is_matrix: bool) -> float:
    peak, rates = (box.matrix_flop, _MATRIX) if is_matrix else (box.vector_flop, _VECTOR)
    seconds = flop / (peak * _share(rates, flop)) if flop else 0.0
    return seconds + (moved / (box.memory_bytes * _share(_MEMORY, moved)) if moved else 0.0)


def _tensor_s(box: Box, row: Row, options: StepOptions) -> tuple[float, float, float]:
    """Tensor-parallel traffic of a block: forward, backward, computed again."""
    tp = row.layout.tp
    size = options.micro_batch * options.context_tokens * row.model.hidden * _BYTES
    net = box.node if tp <= 8 else box.network
    if not options.stack.sequence_parallel:
        once = 2 * net.time("all_reduce", size, tp)
        return once, once, once if options.recompute == "full" else 0.0
    gather = net.time("all_gather", size, tp)
    once = 2 * (gather + net.time("reduce_scatter", size, tp))
    return once, once, {"full": once, "attention": 2 * gather, "none": 0.0}[options.recompute]


def step_s(row: Row, options: StepOptions) -> float:
    """Seconds of a step.

    Args:
        row: Model, layout and cluster; of these ``covers``.
        options: Micro-batch, schedule and so on.
    """
    box = BOXES[row.cluster.partition(":")[0]]
    layout, count = row.layout, options.count_micro_batches(row.layout)
    passes, again, optimizer, weights = [0.0, 0.0, 0.0], 0.0, 0.0, 0.0
    shards = layout.dp if layout.zero else 1
    for each in _block(row, options):
        seconds = [
            _takes(box, flop, _BYTES * moved, is_matrix=each.is_matrix)
            for flop, moved in zip(each.flop, each.elements, strict=True)
        ]
        passes = [have + more for have, more in zip(passes, seconds, strict=True)]
        if options.recompute == "full" or (options.recompute == "attention" and each.is_core):
            again += seconds[0]
        weights += each.weights
        held = each.weights / shards
        optimizer += _takes(box, 11 * held, 12 * held, is_matrix=False)
    forward, backward, repeated = _tensor_s(box, row, options)
    blocks = -(-row.model.layers // layout.pp)
    chunk = -(-blocks // options.virtual)
    hop = 0.0
    if layout.pp > 1:
        size = options.micro_batch * options.context_tokens * row.model.hidden * _BYTES
        size /= layout.tp if options.stack.sequence_parallel else 1
        net = box.node if layout.tp * layout.pp <= 8 else box.network
        hop = net.time("p2p", size, 2)
    back = sum(passes[1:]) + again + backward + repeated
    chunk_s = chunk * (passes[0] + forward + back) + 2 * hop
    bubble = (layout.pp - 1) * chunk_s
    if options.virtual > 1 and count % layout.pp:
        bubble += (options.virtual - 1) * (layout.pp - count % layout.pp) * chunk_s
    net = box.node if layout.world <= 8 else box.network
    size = _BYTES * weights
    if layout.zero:
        travels = net.time("reduce_scatter", size, layout.dp)
        travels += net.time("all_gather", size, layout.dp)
    else:
        travels = net.time("all_reduce", size, layout.dp)
    exposed = blocks * travels
    if options.stack.data_overlap:
        exposed = travels + max(0.0, (chunk - 1) * (travels - back))
    busy = count * blocks * (passes[0] + forward + back) + 2 * hop * count * options.virtual
    return busy + bubble + exposed + blocks * optimizer
