"""Which choices of one step share their priced kernels.

Kept true (tests/unit/plan/bounds/test_bounds.py)
    Of one key, parts of a step are the same.
"""

from equipoise.cost.step.request import StepOptions
from equipoise.spec.layout import Layout
from equipoise.spec.offload import offloads_activations


def kernel_key(layout: Layout, options: StepOptions) -> tuple[object, ...]:
    """What the parts of one step's choices depend on: of one key they are the same."""
    is_whole = layout.zero == 3
    return (
        *(layout.tp, layout.cp, layout.ep, layout.etp, layout.pp > 1, options.recompute),
        (layout.order, layout.dp) if layout.pp > 1 else (),
        options.context_strategy if layout.cp > 1 else "",
        (layout.pp, layout.dp, layout.replicas) if is_whole or layout.ep > 1 else (),
        is_whole,
        offloads_activations(options.offload),
    )
