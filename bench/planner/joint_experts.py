"""Plans that know what routers choose, beside plans that take experts as balanced.

Models on described H100 clusters under hot experts (W1), with full windows and with documents of
uneven lengths. *Separate*: the fastest layout for even experts, its documents packed as for even
experts, then the policy and slots that are best for that layout. *Joint*: ``expert_policy = any``:
layout, policy, slots and packs together, each number of ranks that share experts with the skew that
the loads have there. *Joint but packs*: the joint plan with documents packed as for even experts.
All are priced on the same loads; ``gain`` is separate over joint, and null where the layout for
even experts does not fit once they are uneven. Simulated.
"""

import dataclasses
import json
import sys
from typing import Any

from equipoise.cost.step.request import StepOptions
from equipoise.plan.request import PlanRequest, plan
from equipoise.sim.drawn import step_packer
from equipoise.sim.request import StepRequest, simulate
from equipoise.spec.words import read_layout, read_model

RUNS = (
    ("qwen3-30b-a3b", "h100-sxm:32", 4096, 256, None),
    ("mixtral-8x7b", "h100-sxm:64", 4096, 256, None),
    ("qwen3-235b-a22b", "h100-sxm:256", 4096, 1024, None),
    ("qwen3-30b-a3b", "h100-sxm:32", 32768, 128, "pretrain-128k"),
    ("mixtral-8x7b", "h100-sxm:64", 32768, 128, "pretrain-128k"),
)
LOADS, SLOTS, SECONDS = "W1", 2, 40.0
BALANCED = (("fixed", 1), ("exact", 1), ("exact", 2), ("hecate", 1), ("hecate", 2))
"""Policies with their slots, as a separate plan tries them; ``eplb`` keeps its copies, whose way is
not charged, so it is left to the joint search's own sentences."""


def _request(
    model: str, cluster: str, context: int, sequences: int, words: dict[str, str]
) -> StepRequest:
    kept = StepRequest.__dataclass_fields__.keys()
    given: dict[str, Any] = {key.replace("-", "_"): value for key, value in words.items()}
    given = {key: value for key, value in given.items() if key in kept}
    given |= {"context_tokens": context, "step_sequences": sequences}
    given["micro_batch"] = int(given["micro_batch"])
    return StepRequest(**({"model": model, "cluster": cluster} | given))


def _price(
    asked: StepRequest, lengths: str | None, policy: str, slots: int, *, knows: bool
) -> dict[str, Any]:
    """A layout's step under the loads, and whether it fits.

    Args:
        asked: Without loads.
        lengths: Of documents.
        policy: What balances.
        slots: Most copies.
        knows: Whether packs know the loads.
    """
    packed: dict[str, Any] = {} if lengths is None else {"lengths": lengths}
    if lengths is not None and not knows:
        layout = read_layout(asked.layout).layout
        options = StepOptions(asked.context_tokens, asked.step_sequences, asked.micro_batch)
        packed = {
            "documents": step_packer(read_model(asked.model), lengths, options)(layout, options)
        }
    request = dataclasses.replace(
        asked, expert_loads=LOADS, expert_policy=policy, expert_slots=slots, **packed
    )
    answer = simulate(request)
    return {
        "layout": asked.layout,
        "policy": policy,
        "slots": slots,
        "skew": answer.options.skew_of(read_layout(asked.layout).layout),
        "step_s": answer.step_s,
        "fits": answer.run.price.fits,
    }


def measure_run(
    model: str, cluster: str, context: int, sequences: int, lengths: str | None
) -> dict[str, Any]:
    """Both ways of planning one model."""
    sizes = model, cluster, context, sequences
    packed: dict[str, Any] = {} if lengths is None else {"lengths": lengths}
    even = plan(PlanRequest(*sizes, seconds=SECONDS, **packed)).best.words
    asked = _request(*sizes, {key: each for key, each in even.items() if key != "lengths"})
    apart = [_price(asked, lengths, *each, knows=False) for each in BALANCED]
    whole = plan(
        PlanRequest(
            *sizes,
            expert_loads=LOADS,
            expert_policy="any",
            expert_slots=SLOTS,
            seconds=len(BALANCED) * SECONDS,
            **packed,
        )
    )
    words = whole.best.words
    chosen = words["expert-policy"], int(words.get("expert-slots", 1))
    plain = {
        key: each
        for key, each in words.items()
        if key != "lengths" and not key.startswith("expert")
    }
    asked = _request(*sizes, plain)
    joint = _price(asked, lengths, *chosen, knows=True)
    best = min(apart, key=lambda each: (not each["fits"], each["step_s"]))
    gain = best["step_s"] / joint["step_s"] if best["fits"] else None
    row = {"separate": best, "joint": joint, "gain": gain}
    if lengths is not None:
        row["joint but packs"] = _price(asked, lengths, *chosen, knows=False)
    return row | {"all_separate": apart, "joint_says": list(whole.lock.remarks)}


def measure() -> dict[str, Any]:
    """Every model."""
    return {
        "bench": "planner.joint_experts",
        "kind": "simulated",
        "loads": LOADS,
        "runs": {
            f"{model} on {cluster}, {n} x {context} tokens, {lengths or 'full windows'}": (
                measure_run(model, cluster, context, n, lengths)
            )
            for model, cluster, context, n, lengths in RUNS
        },
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
    sys.stdout.write("\n")
