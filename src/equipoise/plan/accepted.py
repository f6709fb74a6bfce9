"""Which runs ``equipoise train`` begins: what layout, model and packing must have in common.

Why
    A plan that train refuses is none, and a run that cannot work should end before a token is made
    or a rank started. So both ask here.

What it decides
    Degrees make up the ranks and divide the model, each stage has a layer, experts fold, and the
    packer's documents are divided in at most one way.

Kept true (tests/unit/cli/test_verbs.py, tests/unit/plan/test_trainable.py)
    Every choice of a plan and of a measured search is accepted.
"""

from equipoise.balance.turns import require_policy
from equipoise.base.errors import LayoutError
from equipoise.schedule.expert import split_experts
from equipoise.spec.model import ModelSpec
from equipoise.spec.run import RunSpec


def require_accepted(spec: RunSpec, model: ModelSpec, ranks: int) -> None:
    """Refuse what no ranks can run.

    Args:
        spec: All keys.
        model: Sizes.
        ranks: Of the run.

    Raises:
        LayoutError: names the keys that do not go together.
    """
    layout = spec.layout
    require_policy(
        spec.pack.policy,
        context=layout.context,
        pipeline=layout.pipeline,
    )
    layout.of_ranks(ranks).require_model(model)
    if layout.stages > model.layers:
        raise LayoutError(
            f"{model.layers} layers cannot fill the {layout.stages} stages of "
            f"layout.pipeline = {layout.pipeline} ranks with {layout.stages // layout.pipeline} "
            f'stages each. Lower layout.pipeline, or set layout.schedule = "1f1b", which has one '
            f"stage a rank."
        )
    if max(layout.expert, layout.expert_tensor) > 1:
        split_experts(model.experts, ranks=layout.expert)
