"""equipoise: train and serve large models so that every device finishes at the same time.

The public names, each imported when it is first asked for: ``import equipoise`` loads nothing.
``balance``, ``plan`` and ``train`` are packages with functions of their own::

    from equipoise import balance, plan, simulate, train

    balance.batch([8000, 300, 4000], ranks=2, price="llama3-8b")   # any trainer's batch
    simulate(StepRequest(...))                                     # a step on a cluster
    plan.plan(PlanRequest(...))                                    # the fastest layout
    train.run("run.toml")                                          # train

Their types stand in ``__init__.pyi``.
"""

__version__ = "0.1.0"

_HOMES = {
    "EquipoiseError": "base.errors",
    "LoadCurve": "cost.curve",
    "ModelSpec": "spec.model.presets",
    "PackSpec": "spec.run.spec",
    "PlanRequest": "plan.request",
    "RunPlanRequest": "plan.request",
    "RunSpec": "spec.run.spec",
    "ServingPlanRequest": "plan.serving.request",
    "ServingRequest": "sim.serve.request",
    "StepRequest": "sim.request",
    "balance": "",
    "counted_curve": "cost.curve",
    "model_from_hf_config": "spec.model.hf_config",
    "plan": "",
    "preset": "spec.model.presets",
    "read_run": "observe.reader",
    "simulate": "sim.request",
    "simulate_serving": "sim.serve.request",
    "train": "",
}
"""The module below this package that has each public name; none for the packages."""

_NEED_TORCH = {
    "BalancedBatchSampler": "data.adapters.sampler",
    "ContextCollator": "parallel.context.batch",
    "PackedBatchSampler": "data.sampler",
    "PackedLoader": "data.loader",
    "balance_trainer": "data.adapters.trainer",
    "shard_batch": "parallel.context.batch",
    "use_context_parallelism": "parallel.context.transformers",
}
"""The same for names that need torch; ``import *`` leaves them out where it is not installed."""


def __getattr__(name: str) -> object:
    """A public name, imported when it is first asked for."""
    if name == "__all__":
        from importlib.util import find_spec

        return sorted((_HOMES | _NEED_TORCH) if find_spec("torch") else _HOMES)
    home = (_HOMES | _NEED_TORCH).get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name) if home else None
    value = value or import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_NEED_TORCH})
