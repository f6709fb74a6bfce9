"""transformers as oracle of experts: Mixtral's and Qwen 2's blocks, in fp64, and their loss."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2_moe import modeling_qwen2_moe

from equipoise.nn.moe.balance import balance_loss
from equipoise.nn.moe.layer import MixtureOfExperts
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import ModelSpec

PLAIN = ModelSpec(
    layers=2,
    hidden=32,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=16,
    experts=8,
    top_k=2,
    expert_ffn=24,
)
QWEN = dataclasses.replace(
    PLAIN, top_k=3, shared_ffn=40, shared_gate=True, qkv_bias=True, norm_top_k=False
)
BLOCKS = {
    "mixtral": (PLAIN, modeling_mixtral.MixtralSparseMoeBlock),
    "qwen2": (QWEN, modeling_qwen2_moe.Qwen2MoeSparseMoeBlock),
    "qwen2-norm": (
        dataclasses.replace(QWEN, norm_top_k=True),
        modeling_qwen2_moe.Qwen2MoeSparseMoeBlock,
    ),
}


def pairs(ours: MixtureOfExperts, theirs: nn.Module) -> list[tuple[list[nn.Parameter], str]]:
    """Each of their weights, and ours that it is made of, one after another in dim -2."""
    experts = ours.experts
    found = [
        ([ours.router.weight], "gate.weight"),
        ([experts.gate.weight, experts.up.weight], "experts.gate_up_proj"),
        ([experts.down.weight], "experts.down_proj"),
    ]
    if ours.shared is not None:
        shared = ours.shared
        found += [
            ([shared.gate.weight], "shared_expert.gate_proj.weight"),
            ([shared.up.weight], "shared_expert.up_proj.weight"),
            ([shared.down.weight], "shared_expert.down_proj.weight"),
            ([shared.switch.weight], "shared_expert_gate.weight"),
        ]
    assert {name for _, name in found} == {name for name, _ in theirs.named_parameters()}
    return found


@pytest.mark.parametrize(("model", "kind"), BLOCKS.values(), ids=BLOCKS)
def test_a_block_equals_theirs_in_outputs_and_gradients(
    model: ModelSpec, kind: type[nn.Module]
) -> None:
    ours = MixtureOfExperts(model).double()
    config = AutoConfig.for_model(**hf_config(model))
    config._experts_implementation = "eager"
    theirs = kind(config).double()
    with torch.no_grad():
        for weights, name in pairs(ours, theirs):
            for weight in weights:
                weight.normal_(0.0, 0.3)
            theirs.get_parameter(name).copy_(torch.cat(weights, dim=-2))
    x = torch.randn(50, model.hidden, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    pull = torch.randn_like(x)
    found = ours(torch.zeros_like(x), x)
    expected: Tensor = theirs(twin.unsqueeze(0)).squeeze(0)
    # Their scores are a softmax in fp32 whatever the input.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (found * pull).sum().backward()
    (expected * pull).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-5, atol=1e-5)
    for weights, name in pairs(ours, theirs):
        grad = torch.cat([weight.grad for weight in weights], dim=-2)
        want = theirs.get_parameter(name).grad
        assert float((grad - want).abs().max()) <= 1e-5 * float(want.abs().max()), name


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_auxiliary_loss_is_theirs_over_top_k(top_k: int) -> None:
    logits = torch.randn(40, 8)
    scores = torch.softmax(logits, dim=1)
    counts = torch.bincount(torch.topk(scores, top_k).indices.reshape(-1), minlength=8)
    theirs = modeling_mixtral.load_balancing_loss_func((logits,), 8, top_k)
    ours = balance_loss(scores, counts) / len(logits)  # theirs is a mean over tokens
    torch.testing.assert_close(ours, theirs / top_k)
