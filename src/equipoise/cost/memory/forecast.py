"""Forecast of a rank's peak memory, term by term.

Why
    Whether a step fits is asked before it runs, of layouts, devices and models that are not here.

What it decides
    What is *counted* comes from the model, the layout and the program (``nn``, ``fully_shard``) and
    is the same on any device; what a device takes beside that (what its allocator cannot use, what
    its message library holds) is ``DeviceOverhead``, measured and given from outside.

    A rank holds what stays (parameters, their gathered form, optimizer states, gradients so far)
    and what the fullest moment of a step needs:

    ============  =================================================================================
    moment        besides
    ============  =================================================================================
    loss          kept activations of all layers; streams, logits and gradients of the head
    layer i       those of layers up to i; what i works with in its backward; from ZeRO 2 on the
                  buffer that reduced the layer after it, under ZeRO 3 the one that gathers the next
    reduce        buffers that reduce the tables
    ============  =================================================================================

    With mixed precision parameters, their moments and gradients stay fp32; activations, gathered
    parameters and a layer's own gradients are narrow, and are cast at the layer's edges.

    ZeRO shards over dp x cp ranks, in ``replicas`` copies; what experts have, over the edp ranks
    where ranks share experts. ZeRO 0 holds weights twice: ``fully_shard`` copies them even where
    there is nobody to gather from.

Kept true (tests/unit/cost/memory/test_forecast.py)
    Terms are positive, add up, grow with tokens and shrink with ranks; parts of a pipeline add up
    to the whole. How near the forecast is to a real rank's peak is printed by
    ``bench/local/memory.py`` and by every run's report.

Sources
    ZeRO: arXiv:1910.02054, section 3. Buffers: torch 2.13, ``fsdp/_fully_shard``.
"""

from dataclasses import dataclass

from equipoise.cost.memory.layer import LayerBytes, token_bytes
from equipoise.cost.memory.overhead import CPU_OVERHEAD, DeviceOverhead
from equipoise.cost.memory.share import StageShare, whole_model
from equipoise.cost.memory.weights import WeightGroup, count_held, held_groups
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.recompute import LayerRecompute, layer_recompute
from equipoise.spec.run.spec import Precision, Recompute

_LOSS_CHUNK_BYTES, _LOSS_CHUNK_TOKENS = 8 << 20, 128
"""Logits of a chunk: at most these bytes, or those of these tokens (``nn.loss``)."""

_TOKEN_BYTES = 32
"""A token's number, label and position (int64 each) and its mask, whatever the model."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Peak bytes of one rank by term; the interpreter and its libraries are not in it."""

    terms: dict[str, int]
    """``parameters``, ``gathered parameters``, ``gradients``, ``optimizer``, ``activations``,
    ``loss``, ``working space``, ``communication`` and ``device``, at the fullest moment."""

    @property
    def total_bytes(self) -> int:
        """Sum of the terms."""
        return sum(self.terms.values())

    @property
    def counted_bytes(self) -> int:
        """Without what the device takes."""
        return self.total_bytes - self.terms["device"]


def forecast_memory(
    model: ModelSpec,
    layout: Layout,
    *,
    tokens: int,
    precision: Precision,
    recompute: Recompute,
    stage: StageShare | None = None,
    received_values: int = 0,
    micro_batches: int = 2,
    sizes: int = 1,
    trained: float = 1.0,
    overhead: DeviceOverhead = CPU_OVERHEAD,
) -> MemoryForecast:
    """Peak memory of a rank whose largest micro-batch has ``tokens`` tokens.

    Args:
        model: The whole model.
        layout: Degrees of parallelism, ZeRO stage and replicas.
        tokens: Of the largest micro-batch, this rank's share of it along cp [tokens]; tokens that
            tensor-parallel ranks share count once.
        precision: Of activations and gathered parameters; master weights are fp32.
        recompute: Activation recomputation.
        stage: Layers and tables that this rank holds, and micro-batches in flight; the whole
            model, one micro-batch, unless given.
        received_values: Keys and values of other ranks' tokens that a layer keeps for its
            backward, along cp [numbers].
        micro_batches: That the rank runs in a step; what a device takes depends on whether there
            are several.
        sizes: Different sizes of micro-batches that it will see, where the device keeps something
            for each.
        trained: Share of the weights that have a gradient and moments; those of a layer and of the
            tables are taken to be alike.
        overhead: Of the device.

    Returns:
        Bytes by term.

    Cost: microseconds for each layer held.

    >>> from equipoise.spec.model.presets import preset
    >>> terms = forecast_memory(
    ...     preset("7m"), Layout(dp=2, zero=3), tokens=2048, precision="fp32", recompute="none"
    ... ).terms
    >>> terms["parameters"], terms["optimizer"] / terms["parameters"]
    (13048320, 2.0)
    """
    stage = whole_model(model) if stage is None else stage
    width = 4 if precision == "fp32" else 2
    tables, layers = held_groups(model, layout, stage.layers, stage.embeds, stage.has_head)
    largest = max(layers, key=lambda group: group.params, default=WeightGroup(0, 0))
    held = count_held([tables], layers, layout, width=width)
    sums_at_end = layout.zero <= 1
    gradients = int(trained * 4 * held.gradients)
    new = 0 if sums_at_end else width  # of what has a gradient of its own until it is reduced
    ahead = width * largest.params if layout.zero == 3 else 0
    head = model.hidden * -(-model.vocab // layout.tp) if stage.has_head else 0

    rounded = 0  # the largest operand: scaled in 2 bytes, rounded to 1, and laid out by rows
    if precision == "fp8":
        rounded = (width + 2) * max(tokens, model.hidden) * max(model.ffn, model.hidden)
    each = _layers(model, layout, stage, tokens, width, recompute, received_values)
    angles = tokens * (model.head_width * width + _TOKEN_BYTES) * stage.kept_micro_batches
    total = sum(layer.kept for layer in each)
    moments = []
    if stage.has_head:
        activations = total * stage.kept_micro_batches + angles
        loss = _loss(model, layout, tokens, width, head)
        moments.append(_moment(gradients, activations, ahead, loss=loss))
    gone = 0.0
    for at, layer in enumerate(reversed(each)):
        activations = max(total * stage.kept_micro_batches - gone, layer.kept) + angles
        behind = 4 * largest.params if at and not sums_at_end else 0
        working = layer.backward - layer.kept + width * largest.params + rounded
        moments.append(
            _moment(gradients + new * head, activations, ahead + behind, working=working)
        )
        gone += layer.kept
    # In fp32: what is put together, the message library's copy, and what comes out.
    reduced = 4 * ((1 + overhead.message_copies) * tables.params + tables.owned)
    left = 0 if sums_at_end else max(0.0, total * (stage.kept_micro_batches - 1))
    moments.append(_moment(gradients + new * tables.params, left, reduced))

    def taken(terms: dict[str, float]) -> float:
        passing = terms["loss"] + terms["working space"] + terms["communication"]
        return overhead.taken_bytes(
            kept=terms["activations"] if micro_batches > 1 else 0.0,
            passing=passing + (width * held.gathered if layout.zero == 3 else 0),
            narrow_sizes=0 if precision == "fp32" else sizes,
        )

    fullest = max(moments, key=lambda terms: sum(terms.values()) + taken(terms))
    return MemoryForecast(
        {
            "parameters": 4 * held.owned,
            "gathered parameters": width * held.gathered,
            "optimizer": int(trained * 8 * held.owned),
            **{name: int(value) for name, value in fullest.items()},
            "device": int(taken(fullest)),
        }
    )


def _moment(
    gradients: float,
    activations: float,
    communication: float,
    *,
    loss: float = 0.0,
    working: float = 0.0,
) -> dict[str, float]:
    return {
        "gradients": gradients,
        "activations": activations,
        "loss": loss,
        "working space": working,
        "communication": communication,
    }


def _layers(
    model: ModelSpec,
    layout: Layout,
    stage: StageShare,
    tokens: int,
    width: int,
    recompute: Recompute,
    received_values: int,
) -> list[LayerBytes]:
    """Bytes of each layer held, in order, for a whole micro-batch rather than a token."""
    kinds: dict[tuple[bool, LayerRecompute], LayerBytes] = {}
    held = []
    received = received_values * width
    for layer in stage.layers:
        kind = model.is_sparse(layer), layer_recompute(recompute, layer)
        if kind not in kinds:
            each = token_bytes(model, layout, width=width, sparse=kind[0], recompute=kind[1])
            # Where the attention core runs again, keys and values come again.
            keeps = kind[1] in ("none", "selective")
            kinds[kind] = LayerBytes(
                tokens * each.kept + (received if keeps else 0), tokens * each.backward + received
            )
        held.append(kinds[kind])
    return held


def _loss(model: ModelSpec, layout: Layout, tokens: int, width: int, head: int) -> float:
    """Bytes when the last chunk of logits is done.

    The last norm's input, output and its gradient; the head's gradient, in fp32, and of narrow
    numbers its last part; logits in fp32, and their gradient in narrow numbers.
    """
    streams = tokens * model.hidden * width * (2 + 1 / layout.tp)
    narrow = width < 4
    chunk = max(_LOSS_CHUNK_BYTES, 4 * _LOSS_CHUNK_TOKENS * -(-model.vocab // layout.tp))
    return streams + (4 + width * narrow) * head + chunk * (1.5 if narrow else 1)
