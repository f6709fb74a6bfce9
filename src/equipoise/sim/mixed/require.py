"""Refuse layers of their own where they cannot be priced.

Kept true (tests/unit/cli/plan/test_run.py)
    Each refusal has one sentence, with what to leave out.
"""

from equipoise.base.errors import SpecError
from equipoise.cost.curves.parts import is_timed
from equipoise.cost.step.request import Precision
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.device.by_name import Dtype
from equipoise.spec.model.presets import ModelSpec


def require_kernel_prices(model: ModelSpec, cluster: ClusterSpec, precision: Precision) -> None:
    """Refuse layers of their own where steps are priced from timed parts, which are of whole steps.

    Raises:
        SpecError: names the cluster.
    """
    dtype: Dtype = "fp32" if precision == "fp32" else "bf16"
    if precision != "fp8" and is_timed(cluster.device, model, dtype, cluster.devices):
        raise SpecError(
            f"layers are priced one by one from kernels alone, while steps of this model on "
            f"{cluster.name} are priced from timed parts, which include the host's time; the two "
            f"cannot be compared. Leave layers out."
        )


def require_no_offload(offload: str | None) -> None:
    """Refuse layers of their own that offload.

    Raises:
        SpecError: says what to leave out.
    """
    if offload not in (None, "none"):
        raise SpecError(
            f"layers with strategies of their own keep everything on the device, so offload = "
            f"{offload} does not go with them. Leave layers or offload out."
        )
