"""The price by which ``layout.parts = "auto"`` chooses, on the machine that a run is priced on.

What it decides
    Products of a feed-forward as wide as the model's set the speed, exchanges between the ranks
    that share it set the link. On processors that send by themselves moving takes cores: all of it
    from computing, unless there are twice as many cores as ranks. A run keeps what it began with,
    so that a later calibration changes no choice, and with it no bit, of a run that is resumed.

Kept true (tests/unit/sim/settle/test_parts.py)
    A kept price is taken up again; where moving takes the cores of computing, one part is best.
"""

from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import Precision
from equipoise.observe.machine import usable_cores
from equipoise.sim.machine import Machine
from equipoise.sim.settle.sharding import own_machine
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.device.by_name import THIS_CPU
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.resolved import PartMachine, read_resolved
from equipoise.spec.run.spec import RunSpec

_ROWS = 1024
"""Rows of the product whose speed stands for all."""
_SMALL_BYTES, _LARGE_BYTES = 1.0, float(1 << 24)


def settle_parts(spec: RunSpec, model: ModelSpec, ranks: int, folder: Path) -> PartMachine | None:
    """The price by which a run's ``auto`` chooses; None if it has nothing to choose.

    Args:
        spec: The run.
        model: Its sizes.
        ranks: All of them.
        folder: The run's; where it has begun, it keeps what it began with.
    """
    layout = spec.layout.of_ranks(ranks)
    if spec.layout.parts != "auto" or layout.tp * layout.ep == 1:
        return None
    try:
        begun = read_resolved(folder)
    except SpecError:
        begun = None
    if begun is not None and begun.part_machine is not None and begun.model == model:
        return begun.part_machine
    return part_machine(own_machine(ranks), model, layout, precision=spec.train.precision)


def part_machine(
    cluster: ClusterSpec, model: ModelSpec, layout: Layout, *, precision: Precision
) -> PartMachine:
    """Prices of a feed-forward's products and exchanges on a cluster.

    Args:
        cluster: What the ranks run on.
        model: Its sizes.
        layout: Ranks that share feed-forwards (tp), or experts (ep).
        precision: As ``train.precision``.
    """
    machine = Machine(cluster, precision)
    axis, ffn = ("tp", model.ffn // layout.tp) if layout.tp > 1 else ("ep", model.expert_ffn)
    product_s = machine.product_s(_ROWS, ffn, model.hidden, fp8=False)
    exchange = machine.collective(tuple(layout.group_of(0, axis)))
    start_s = exchange("all_to_all", _SMALL_BYTES)
    large_s = exchange("all_to_all", _LARGE_BYTES)
    sends_itself = machine.device.name == THIS_CPU
    has_spare = len(usable_cores()) >= 2 * min(layout.world, cluster.devices)
    return PartMachine(
        flop_per_s=2.0 * _ROWS * ffn * model.hidden / product_s,
        start_s=start_s,
        bytes_per_s=_LARGE_BYTES / max(large_s - start_s, 1e-12),
        shared=1.0 if sends_itself and not has_spare else 0.0,
    )
