"""Models that transformers builds, called as our own decoder is: the same, or refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from equipoise.base.errors import ModelError
from equipoise.parallel.context.transformers import register_attention
from equipoise.parallel.theirs.build import (
    build_random,
    build_theirs,
    load_theirs,
    require_trainable,
    wrap_theirs,
)
from equipoise.parallel.theirs.head import Head, read_head
from equipoise.parallel.theirs.layers import find_layers
from equipoise.parallel.theirs.model import reference_loss
from equipoise.parallel.theirs.shrink import read_config, shrink_config, write_config
from equipoise.parallel.theirs.tried import require_exact_folder, try_out
from equipoise.spec.model.other_config import model_from_other_config
from support.hf.models import FAMILIES, build_engine, engine_config

DOC_TOKENS = (23, 1, 40)
TOKENS = sum(DOC_TOKENS)


def errors(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(
        float((x - y).abs().max() / y.abs().max().clamp(min=1e-9))
        for x, y in zip(one, other, strict=True)
    )


def sizes(theirs: Any) -> Any:
    return model_from_other_config(theirs.config.to_dict())


@pytest.mark.parametrize("kind", FAMILIES)
def test_loss_logits_and_gradients_are_those_of_transformers(kind: str) -> None:
    theirs = build_engine(kind)
    ids = torch.randint(theirs.config.vocab_size, (TOKENS,), generator=torch.manual_seed(0))
    labels = ids.roll(-1)
    labels[torch.tensor([5, TOKENS - 1])] = -1
    plain = copy.deepcopy(theirs).train()
    wanted = reference_loss(plain, ids, DOC_TOKENS, labels)
    wanted.backward()
    with torch.no_grad():
        wanted_logits = reference_loss(plain, ids, DOC_TOKENS, None)

    model = wrap_theirs(theirs, sizes(theirs), context_tokens=64)
    loss = model(ids, DOC_TOKENS, labels_T=labels)
    loss.backward()
    with torch.no_grad():
        logits = model(ids, DOC_TOKENS)
    assert errors([loss.detach(), logits], [wanted.detach(), wanted_logits]) <= 2e-6
    pairs = [
        (mine.grad, right.grad)
        for mine, right in zip(theirs.parameters(), plain.parameters(), strict=True)
    ]
    assert all((mine is None) == (right is None) for mine, right in pairs)
    norms = [float(right.norm()) for _, right in pairs if right is not None]
    for mine, right in pairs:
        if right is not None:
            assert float((mine - right).norm()) <= 1e-5 * max(
                float(right.norm()), 1e-3 * max(norms)
            )
    model.zero_grad()
    nothing = model(ids[:0], (), labels_T=ids[:0])
    nothing.backward()
    assert float(nothing.detach()) == 0 and model(ids[:0], ()).shape == (
        0,
        theirs.config.vocab_size,
    )
    assert not any(float(w.grad.abs().max()) for w in theirs.parameters() if w.grad is not None)


def test_heads_are_read_from_what_a_model_does() -> None:
    assert read_head(build_engine("llama")) == Head()
    assert read_head(build_engine("granite")) == Head(scale=pytest.approx(1 / 3))
    assert read_head(build_engine("cohere")) == Head(scale=0.0625)
    assert read_head(build_engine("gemma2")) == Head(softcap=0.3)

    class Clipped(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **options: Any) -> Any:
            out = super().forward(*args, **options)
            out.logits = out.logits.clamp(-50, 50)  # never reached by random weights
            return out

    clipped = Clipped(build_engine("llama").config).eval()
    assert read_head(clipped) is None
    biased = build_engine("llama")
    biased.lm_head = nn.Linear(32, 61)
    assert read_head(biased) is None
    ids = torch.arange(9)
    right = reference_loss(copy.deepcopy(biased), ids, [9], ids)
    own = wrap_theirs(biased, sizes(biased), context_tokens=64)
    loss = own(ids, [9], labels_T=ids)
    assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=1e-6)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_small_model_has_every_kind_of_layer_and_is_exact(kind: str) -> None:
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]()
    small = read_config(write_config(shrink_config(config)))
    kinds = set(getattr(config, "layer_types", None) or [])
    assert set(getattr(small, "layer_types", None) or []) == kinds
    theirs = build_random(small, seed=0)
    assert sum(weight.numel() for weight in theirs.parameters()) < 1_000_000
    assert len(find_layers(theirs)) == small.num_hidden_layers
    try_out(theirs)


def test_a_model_that_reads_its_neighbour_is_refused_with_a_table() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x.roll(1, 1)

    theirs = build_random(engine_config("llama"), seed=0)
    theirs.model.layers[1].mlp = nn.Sequential(theirs.model.layers[1].mlp, Reads())
    with pytest.raises(ModelError) as caught:
        try_out(theirs)
    first, header, *rows, last = str(caught.value).splitlines()
    assert first == (
        "LlamaForCausalLM is not exact over ranks: some layer reads other tokens, goes by where a "
        "token lies, or has a loss of its own."
    )
    assert header.split() == ["documents", "compared", "error", "allowed", "1e-03"]
    assert [row.split()[-1] for row in rows] == ["exact", "WRONG", "WRONG"]
    assert last == "Train another model, or this one with its own trainer."


def save(folder: Path, kind: str = "llama", **changed: Any) -> Path:
    build_engine(kind, **changed).save_pretrained(folder)
    return folder


def test_weights_are_those_of_the_folder_and_random_where_it_has_none(tmp_path: Path) -> None:
    folder = save(tmp_path / "whole")
    theirs = load_theirs(folder, seed=0)
    assert all(map(torch.equal, theirs.parameters(), build_engine("llama").parameters()))
    empty = tmp_path / "empty"
    engine_config("llama").save_pretrained(empty)
    first, again, other = (load_theirs(empty, seed=seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def refused(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_folders_that_do_not_do(tmp_path: Path) -> None:
    folder = save(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refused(load_theirs, folder, seed=0) == (
        f"{folder} has pytorch_model.bin and no safetensors, and a run's first weights would be "
        f"random. Save the model as safetensors."
    )
    deeper = save(tmp_path / "deeper")
    config = engine_config("llama")
    config.num_hidden_layers = 3
    config.save_pretrained(deeper)
    assert refused(load_theirs, deeper, seed=0) == (
        f"{deeper} lacks model.layers.2.input_layernorm.weight, "
        f"model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight and 6 more. "
        f"Give a folder that transformers saved whole."
    )
    shallower = save(tmp_path / "shallower")
    config.num_hidden_layers = 1
    config.save_pretrained(shallower)
    assert refused(load_theirs, shallower, seed=0).startswith(
        f"{shallower} has weights that the model has no place for: model.layers.1."
    )
    quantised = tmp_path / "quantised"
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    config.save_pretrained(quantised)
    assert refused(load_theirs, quantised, seed=0) == (
        f"{quantised} holds quantised weights (quantization_config), which cannot be trained. Use "
        f"the model's unquantised folder."
    )


def test_models_that_would_depend_on_chance_or_packing(tmp_path: Path) -> None:
    dropping = build_engine("gpt2", attn_pdrop=0.0, embd_pdrop=0.1, resid_pdrop=0.0)
    assert refused(require_trainable, dropping, 64) == (
        "GPT2LMHeadModel draws at random in training (embd_pdrop = 0.1), so that no two layouts "
        "have the same loss. Set embd_pdrop to 0 in its config.json."
    )
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    stretching = build_engine("llama", max_position_embeddings=128, rope_parameters=rope)
    require_trainable(stretching, 128)
    assert refused(require_trainable, stretching, 129) == (
        "LlamaForCausalLM has RoPE of type dynamic: beyond 128 tokens its frequencies depend on "
        "the longest document of a pack, so that no two packings have the same loss. Set "
        "pack.context_tokens to 128 or less."
    )
    routed = build_engine("mixtral", output_router_logits=True)
    assert refused(register_attention, routed) == (
        "MixtralForCausalLM adds a loss for its experts' balance, which is not a sum over tokens. "
        "Set config.output_router_logits = False."
    )
    folder = save(tmp_path / "bloom", "bloom")
    assert refused(require_exact_folder, folder, 64) == (
        "BloomForCausalLM does not take its attention from the registry of transformers. Call "
        "context_attention in its code, or choose a model that uses the registry."
    )
    unknown = save(tmp_path / "unknown")
    config = (unknown / "config.json").read_text().replace('"llama"', '"nope"')
    (unknown / "config.json").write_text(config)
    assert refused(build_theirs, unknown, sizes(routed), seed=0, context_tokens=64).startswith(
        f"transformers cannot build the model of {unknown}: "
    )
