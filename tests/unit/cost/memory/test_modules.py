"""What modules that are computed again drop, byte by byte, as Megatron-Core's code says."""

import pytest

from equipoise.cost.memory.device import kept_bytes
from equipoise.cost.step.request import Stack, StepOptions
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED, ModelSpec
from equipoise.spec.program.file import read_program

DEEPSEEK, GPT_OSS = PLANNED["deepseek-v3"], PLANNED["gpt-oss-120b"]
CORE = read_program("megatron-core").stack


def dropped(model: ModelSpec, setting: str, *, sparse: bool, precision: str = "bf16") -> float:
    """Bytes of a token that a layer keeps without the setting and not with it."""
    options = StepOptions(4096, 1, precision=precision, stack=CORE)
    plain, less = (
        kept_bytes(model, Layout(), options, sparse=sparse, recompute=each, doc_tokens=4096)
        for each in ("none", setting)
    )
    return plain - less


@pytest.mark.parametrize(
    ("setting", "sparse", "expected"),
    [
        # 128 heads of 192 for queries and keys and 128 for values; of the latent vectors their
        # norms' outputs, 1,536 and 512.
        ("mla_up_proj", True, 2 * 128 * (192 + 192 + 128) + 2 * (1536 + 512)),
        ("layernorm", True, 2 * 2 * 7168),
        ("layernorm", False, 2 * 7168),
        ("moe_act", True, 8 * 2 * 2048),
        ("moe_act", False, 0),
        ("shared_experts", True, 3 * 2 * 2048),
        ("mlp", False, 3 * 2 * 18_432 + 2 * 7168),
        ("mlp", True, 0),
        ("core_attn", True, 4 * 128),
        # Rows, hidden units and where rows went; the shared expert; scores of the router.
        ("moe", True, 8 * (2 * 7168 + 3 * 2 * 2048 + 8) + 3 * 2 * 2048 + 4 * 256),
    ],
)
def test_a_module_drops_its_own(setting: str, sparse: bool, expected: float) -> None:
    assert dropped(DEEPSEEK, setting, sparse=sparse) == pytest.approx(expected)


def test_modules_add_up_and_fp8_drops_what_is_kept_in_8_bits() -> None:
    both = dropped(DEEPSEEK, "layernorm+moe_act", sparse=True)
    each = (dropped(DEEPSEEK, name, sparse=True) for name in ("layernorm", "moe_act"))
    assert both == pytest.approx(sum(each))
    assert dropped(DEEPSEEK, "moe_act", sparse=True, precision="fp8") == 8 * 2048


def test_norms_that_are_part_of_a_product_are_kept() -> None:
    # Without latent attention only the norm of a sparse layer is a kernel of its own.
    assert dropped(GPT_OSS, "layernorm", sparse=True) == 2 * GPT_OSS.hidden


def test_what_an_expert_gives_back_is_kept_unless_its_hidden_units_are_weighed() -> None:
    weighed, scaled = (
        kept_bytes(
            DEEPSEEK,
            Layout(),
            StepOptions(4096, 1, stack=Stack(weighs_hidden=is_weighed)),
            sparse=True,
            recompute="none",
            doc_tokens=4096,
        )
        for is_weighed in (True, False)
    )
    assert scaled - weighed == 8 * 2 * 7168
