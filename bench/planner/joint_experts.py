"""Plans that know what routers choose, beside plans that take experts as balanced.

Three models on described H100 clusters under hot experts (W1). *Separate*: the fastest layout for
even experts, then the policy and slots that are best for that layout. *Joint*: the fastest layout
for each policy and number of slots, each number of ranks that share experts with the skew that the
loads have there. Both are priced on the same loads; ``gain`` is separate over joint. Simulated.
"""

import json
import sys
from typing import Any

from equipoise.plan.request import PlanRequest, plan
from equipoise.sim.request import StepRequest, simulate
from equipoise.spec.words import read_layout

RUNS = (
    ("qwen3-30b-a3b", "h100-sxm:32", 256),
    ("mixtral-8x7b", "h100-sxm:64", 256),
    ("qwen3-235b-a22b", "h100-sxm:256", 1024),
)
LOADS, TOKENS, SECONDS = "W1", 4096, 40.0
BALANCED = (("fixed", 1), ("exact", 1), ("exact", 2))
"""Policies with their slots."""


def _search(model: str, cluster: str, sequences: int, **loads: Any) -> dict[str, str]:
    request = PlanRequest(model, cluster, TOKENS, sequences, seconds=SECONDS, **loads)
    return plan(request).lock.best.words


def _price(
    model: str, cluster: str, sequences: int, words: dict[str, str], policy: str, slots: int
) -> dict[str, Any]:
    """A layout's step under the loads, and whether it fits."""
    given: dict[str, Any] = {key.replace("-", "_"): value for key, value in words.items()}
    given |= {"context_tokens": TOKENS, "step_sequences": sequences}
    given["micro_batch"] = int(given["micro_batch"])
    kept = StepRequest.__dataclass_fields__.keys() & given.keys()
    request = StepRequest(
        **({key: given[key] for key in kept} | {"model": model, "cluster": cluster}),
        expert_loads=LOADS,
        expert_policy=policy,
        expert_slots=slots,
    )
    answer = simulate(request)
    return {
        "layout": given["layout"],
        "policy": policy,
        "slots": slots,
        "skew": answer.options.skew_of(read_layout(given["layout"]).layout),
        "step_s": answer.step_s,
        "fits": answer.run.price.fits,
    }


def measure_run(model: str, cluster: str, sequences: int) -> dict[str, Any]:
    """Both ways of planning one model."""
    even = _search(model, cluster, sequences)
    apart = [_price(model, cluster, sequences, even, *each) for each in BALANCED]
    joint = []
    for policy, slots in BALANCED:
        words = _search(
            model,
            cluster,
            sequences,
            expert_loads=LOADS,
            expert_policy=policy,
            expert_slots=slots,
        )
        joint.append(_price(model, cluster, sequences, _plain(words), policy, slots))
    best = {
        side: min((each for each in rows if each["fits"]), key=lambda each: each["step_s"])
        for side, rows in (("separate", apart), ("joint", joint))
    }
    gain = best["separate"]["step_s"] / best["joint"]["step_s"]
    return best | {"gain": gain, "all_separate": apart, "all_joint": joint}


def _plain(words: dict[str, str]) -> dict[str, str]:
    """Without what the price is asked with anyway."""
    return {key: value for key, value in words.items() if not key.startswith("expert")}


def measure() -> dict[str, Any]:
    """Every model."""
    return {
        "bench": "planner.joint_experts",
        "kind": "simulated",
        "loads": LOADS,
        "runs": {
            f"{model} on {cluster}": measure_run(model, cluster, n) for model, cluster, n in RUNS
        },
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
