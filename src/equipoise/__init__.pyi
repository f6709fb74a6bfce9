from equipoise import balance as balance
from equipoise import plan as plan
from equipoise import train as train
from equipoise.base.errors import EquipoiseError as EquipoiseError
from equipoise.cost.curve import LoadCurve as LoadCurve
from equipoise.cost.curve import counted_curve as counted_curve
from equipoise.data.adapters.sampler import BalancedBatchSampler as BalancedBatchSampler
from equipoise.data.adapters.trainer import balance_trainer as balance_trainer
from equipoise.data.loader import PackedLoader as PackedLoader
from equipoise.data.sampler import PackedBatchSampler as PackedBatchSampler
from equipoise.observe.reader import read_run as read_run
from equipoise.parallel.context.batch import ContextCollator as ContextCollator
from equipoise.parallel.context.batch import shard_batch as shard_batch
from equipoise.parallel.context.transformers import (
    use_context_parallelism as use_context_parallelism,
)
from equipoise.plan.request import PlanRequest as PlanRequest
from equipoise.plan.request import RunPlanRequest as RunPlanRequest
from equipoise.plan.serving.request import ServingPlanRequest as ServingPlanRequest
from equipoise.sim.request import StepRequest as StepRequest
from equipoise.sim.request import simulate as simulate
from equipoise.sim.serve.request import ServingRequest as ServingRequest
from equipoise.sim.serve.request import simulate_serving as simulate_serving
from equipoise.spec.model.hf_config import model_from_hf_config as model_from_hf_config
from equipoise.spec.model.presets import ModelSpec as ModelSpec
from equipoise.spec.model.presets import preset as preset
from equipoise.spec.run.spec import PackSpec as PackSpec
from equipoise.spec.run.spec import RunSpec as RunSpec

__version__: str

__all__ = [
    "BalancedBatchSampler",
    "ContextCollator",
    "EquipoiseError",
    "LoadCurve",
    "ModelSpec",
    "PackSpec",
    "PackedBatchSampler",
    "PackedLoader",
    "PlanRequest",
    "RunPlanRequest",
    "RunSpec",
    "ServingPlanRequest",
    "ServingRequest",
    "StepRequest",
    "balance",
    "balance_trainer",
    "counted_curve",
    "model_from_hf_config",
    "plan",
    "preset",
    "read_run",
    "shard_batch",
    "simulate",
    "simulate_serving",
    "train",
    "use_context_parallelism",
]
