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

from equipoise.balance.pack import DIVIDES
from equipoise.balance.turns import TOGETHER
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
    _require_policy(spec)
    layout = spec.layout
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


def _require_policy(spec: RunSpec) -> None:
    context, policy = spec.layout.context, spec.pack.policy
    stages = spec.layout.pipeline
    if policy in DIVIDES and policy not in TOGETHER and (stages == 1 or context > 1):
        raise LayoutError(
            f'pack.policy = "{policy}" lets parts of one document attend to each other from '
            f"different micro-batches, which only a pipeline of whole micro-batches runs; "
            f"layout.pipeline = {stages} and layout.context = {context}. Set layout.pipeline = 2 "
            f'and layout.context = 1, or pack.policy = "divided", "by-work" or "delayed".'
        )
    if stages > 1 and policy in TOGETHER:
        raise LayoutError(
            f'pack.policy = "{policy}" divides documents over all ranks at once, and '
            f"layout.pipeline = {stages} has ranks that compute one after another. Set "
            f'layout.pipeline = 1, or pack.policy = "divided-in-time" or "by-work".'
        )
    if context > 1 and policy in TOGETHER:
        raise LayoutError(
            f'pack.policy = "{policy}" divides documents over ranks itself, and layout.context = '
            f"{context} would divide them again. Set layout.context = 1, or pack.policy = "
            f'"by-work".'
        )
    if spec.layout.tensor > 1 and policy in TOGETHER:
        raise LayoutError(
            f'pack.policy = "{policy}" divides documents over all ranks, and layout.tensor = '
            f"{spec.layout.tensor} has ranks that share weights among them. Set layout.tensor = 1, "
            f'or pack.policy = "by-work".'
        )
