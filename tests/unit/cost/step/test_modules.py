"""What computing modules again takes, and who may ask for it."""

import re

import numpy as np
import pytest

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import TERMS
from equipoise.sim.parts import StepParts
from equipoise.sim.request import StepRequest, read_step
from equipoise.spec.recompute import MODULES, read_recompute


def layers(setting: str) -> tuple[dict[str, float], dict[str, float]]:
    """What a setting adds to a dense and to a sparse layer's backward, by term [s]."""
    added = []
    for name in (setting, "none"):
        request = StepRequest(
            "deepseek-v3",
            "h100-sxm:64",
            "pp=4,ep=16,dp=16,zero=1",
            4096,
            64,
            recompute=name,
            program="megatron-core",
        )
        asked = read_step(request)
        parts = StepParts(asked.model, asked.machine, asked.layout, asked.options)
        made = parts.price(asked.options.context_tokens * np.ones(1)).layers
        added.append((made[0][1], made[-1][1]))
    both = [here - there for here, there in zip(*added, strict=True)]
    dense, sparse = (dict(zip(TERMS, map(float, each), strict=True)) for each in both)
    return dense, sparse


def test_a_module_repeats_its_own_work_and_no_other() -> None:
    spent = {name: layers(name) for name in MODULES}
    for dense, sparse in spent.values():
        assert min(*dense.values(), *sparse.values()) >= 0
    used = {
        name: tuple({term for term in each if each[term] > 0} for each in both)
        for name, both in spent.items()
    }
    moves = {"element-wise", "launches"}
    assert used == {
        "core_attn": ({"attention"}, {"attention"}),
        "layernorm": (moves, moves),
        "mla_up_proj": (moves | {"products"},) * 2,
        "mlp": (moves | {"products"}, set()),
        "moe": (set(), moves | {"products", "experts", "expert traffic"}),
        "moe_act": (set(), moves),
        "shared_experts": (set(), moves | {"products"}),
    }
    # Together they take no more than the layer does once.
    _, whole = layers("full")
    _, some = layers("layernorm+mla_up_proj+moe+core_attn")
    assert sum(some.values()) <= sum(whole.values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"recompute": "layernrom+moe_act"},
            'recompute: "layernrom" is not one of core_attn, layernorm, mla_up_proj, mlp, moe, '
            'moe_act, shared_experts. Nearest: "layernorm". Modules are joined with +, as '
            "layernorm+moe_act.",
        ),
        (
            {"recompute": "moe+moe"},
            'recompute: "moe+moe" names moe twice. Name it once.',
        ),
        (
            {"model": "llama3-8b", "recompute": "layernorm+moe_act"},
            "recompute layernorm+moe_act: moe_act needs experts, and the model has none. Give "
            "layernorm.",
        ),
        (
            {"model": "mixtral-8x7b", "program": "equipoise"},
            "program equipoise recomputes no modules, and --recompute is moe_act. Give --recompute "
            "none, or another --program, as megatron-core.",
        ),
        (
            {"program": "hai-llm", "recompute": "mlp+moe_act"},
            "program hai-llm cannot recompute mlp; its modules are layernorm, mla_up_proj, "
            "moe_act. Give those, or another --program.",
        ),
    ],
)
def test_what_cannot_be_computed_again_is_refused(changed: dict[str, str], message: str) -> None:
    asked = {"model": "deepseek-v3", "recompute": "moe_act", "program": "megatron-core"} | changed
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        read_step(
            StepRequest(
                asked["model"],
                "h100-sxm:8",
                "dp=8",
                4096,
                64,
                recompute=asked["recompute"],
                program=asked["program"],
            )
        )


def test_modules_are_read_in_any_order() -> None:
    assert read_recompute("moe_act+layernorm") == read_recompute("layernorm+moe_act")
