"""RoPE whose frequencies go by the longest sequence, over ranks; and a check that can fail."""

from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.base.errors import CheckError, LayoutError, ModelError
from equipoise.comm.local import run_ranks
from equipoise.parallel.context.transformers import use_context_parallelism
from equipoise.parallel.context.transformers_check import check_context_parallelism
from equipoise.parallel.context.transformers_rope import switch_lengths

# Ranks are other processes: they import by name what these tests hand to ``run_ranks``.
from support.ranks import hf_rope_ranks
from support.ranks.hf_context_ranks import build
from support.ranks.hf_rope_ranks import MODELS, PACKS


@pytest.mark.parametrize(
    ("kind", "sharding"), [*zip(MODELS, cycle(["contiguous", "head-tail-document"]), strict=False)]
)
def test_packs_that_grow_and_shrink_equal_the_packed_row_on_one_rank(
    kind: str, sharding: str
) -> None:
    bound = 1e-6 if kind.startswith("gemma3") else 1e-10  # norms compute in fp32
    for told in run_ranks(2, hf_rope_ranks.compare_steps, kind, sharding):
        assert len(told) == len(PACKS)
        for lengths, errors in zip(PACKS, told, strict=True):
            assert max(errors) <= bound, (lengths, errors)


@pytest.mark.parametrize("kind", MODELS)
def test_they_are_tried_out_beyond_the_switch(kind: str) -> None:
    model = hf_rope_ranks.build(kind)
    assert hf_rope_ranks.SWITCH in switch_lengths(model.config)
    assert check_context_parallelism(model) <= 1e-5


def test_a_switch_at_131072_tokens_is_tried_with_short_documents() -> None:
    model = build("llama", torch.float32, max_position_embeddings=131_072)
    assert switch_lengths(model.config) == [131_072]
    assert check_context_parallelism(model) <= 1e-5


# Models made wrong: the check must see it. -------------------------------------------------------


class ByItsOwnLength(nn.Module):
    """Frequencies by the largest position that a rank sees, and not a word about it."""

    def __init__(self, rotary: Any, switch_tokens: int) -> None:
        super().__init__()
        self.rotary, self.switch_tokens = rotary, switch_tokens

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        is_long = bool(position_ids.max() >= self.switch_tokens)
        return self.rotary(x, position_ids / 2 if is_long else position_ids)


class CountsTokens(nn.Module):
    """Positions counted on each rank."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return self.rotary(x, torch.arange(position_ids.shape[1])[None])


class CutsGradients(nn.Module):
    """Every second token that a rank holds has no gradient; its output is right."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x_1TD: Tensor) -> Tensor:
        is_cut = (torch.arange(x_1TD.shape[1]) % 2 == 0)[:, None]
        out: Tensor = self.mlp(torch.where(is_cut, x_1TD.detach(), x_1TD))
        return out


def wrong(what: str) -> Any:
    model = build("llama", torch.float32, max_position_embeddings=4096)
    if what == "length":
        model.model.rotary_emb = ByItsOwnLength(model.model.rotary_emb, 4096)
    elif what == "positions":
        model.model.rotary_emb = CountsTokens(model.model.rotary_emb)
    else:
        model.model.layers[0].mlp = CutsGradients(model.model.layers[0].mlp)
    return model


@pytest.mark.parametrize(
    ("what", "start", "quantity"),
    [
        ("length", " at positions up to 16,391 by ", " of the largest logit, "),
        ("positions", " by ", " of the largest logit, "),
        ("gradients", " by ", " of the gradient of model.layers.0."),
    ],
)
def test_a_model_made_wrong_does_not_pass(what: str, start: str, quantity: str) -> None:
    model = wrong(what)
    with pytest.raises(CheckError) as caught:
        check_context_parallelism(model)
    message = str(caught.value)
    one_by_one = "LlamaForCausalLM over 2 ranks differs from its documents one by one"
    assert message.startswith(one_by_one + start)
    assert quantity in message
    assert all(weight.grad is None for weight in model.parameters())


# Refused. ----------------------------------------------------------------------------------------


def test_frequencies_by_length_that_no_module_owns_up_to() -> None:
    model = hf_rope_ranks.build("llama longrope")
    model.model.rotary_emb = ByItsOwnLength(nn.Identity(), 24)
    with pytest.raises(ModelError) as caught:
        use_context_parallelism(model)
    assert str(caught.value) == (
        "LlamaForCausalLM has RoPE of rope_type longrope, whose frequencies go by the longest "
        "sequence, and none of its modules has that rope_type. Choose another rope_type, or train "
        "it without context parallelism."
    )
    assert model.config._attn_implementation == "sdpa"


def test_a_call_without_a_pack() -> None:
    model = hf_rope_ranks.build("llama longrope")
    use_context_parallelism(model)
    with pytest.raises(LayoutError) as caught:
        model(torch.arange(5)[None])
    assert str(caught.value) == (
        "LlamaRotaryEmbedding was called without a pack, but its frequencies depend on the "
        "longest document. Give the model everything shard_batch returns, or choose another "
        'attention: model.set_attn_implementation("sdpa").'
    )
    model.set_attn_implementation("sdpa")
    assert model(torch.arange(5)[None]).logits.shape == (1, 5, 61)


def test_lengths_at_which_frequencies_may_switch() -> None:
    both = {"original_max_position_embeddings": 64}
    layers = {"full_attention": both, "sliding_attention": {"rope_type": "default"}}
    assert switch_lengths(SimpleNamespace(rope_parameters=layers)) == [64]
    assert switch_lengths(SimpleNamespace(max_position_embeddings=128)) == []
