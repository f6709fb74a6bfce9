"""transformers as oracle: the same weights give the same logits, in both directions."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

from equipoise.data.model_files import files_to_keep
from equipoise.data.text.tokenizer import train_tokenizer
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.read import load_hf, read_hf, weight_shapes
from equipoise.nn.hf.write import write_hf
from equipoise.serve.convert import write_folder
from equipoise.serve.source import TrainedModel
from equipoise.spec.model.presets import ModelSpec, RopeScaling

BOUND = 1e-5
PLAIN = ModelSpec(
    layers=3, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=131, head_width=16, rope_theta=5e5
)
# A context of 32 tokens, so that the lengths below reach all three branches of the scaling.
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=32)
FAMILIES = {
    "llama": PLAIN,
    "llama3-rope": dataclasses.replace(PLAIN, rope_scaling=SCALING),
    "qwen2": dataclasses.replace(PLAIN, qkv_bias=True, norm_eps=1e-6),
    "qwen3": dataclasses.replace(PLAIN, qk_norm=True, head_width=32, norm_eps=1e-6),
    "multi-head": dataclasses.replace(PLAIN, kv_heads=4),
    "multi-query": dataclasses.replace(PLAIN, kv_heads=1),
    "mixtral": dataclasses.replace(PLAIN, experts=4, top_k=2, expert_ffn=96),
    "qwen2-moe": dataclasses.replace(
        PLAIN,
        qkv_bias=True,
        norm_eps=1e-6,
        experts=6,
        top_k=3,
        expert_ffn=32,
        shared_ffn=48,
        shared_gate=True,
        norm_top_k=False,
        dense_layers=1,
    ),
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
}
LENGTHS = [50, 1, 97]

each_model = pytest.mark.parametrize(
    "model",
    [
        dataclasses.replace(model, tied=tied)
        for model in FAMILIES.values()
        for tied in (False, True)
    ],
    ids=[f"{name}-{tied}" for name in FAMILIES for tied in ("untied", "tied")],
)


def state_of(model: ModelSpec) -> dict[str, Tensor]:
    """Weights of the scale of a trained model: no norm is one and no bias zero."""
    return {
        name: torch.rand(shape) + 0.5
        if "norm" in name
        else torch.randn(shape) / (math.sqrt(shape[-1]) if len(shape) > 1 else 2.0)
        for name, shape in weight_shapes(model).items()
    }


def documents(model: ModelSpec) -> list[Tensor]:
    return [torch.randint(model.vocab, (length,)) for length in LENGTHS]


@torch.no_grad()
def largest_error(decoder: Decoder, oracle: Any) -> float:
    """Of the logits of each document, ours in one pack; absolute, of logits up to 5 or so."""
    tokens = documents(decoder.model)
    packed = decoder(torch.cat(tokens), LENGTHS).split(LENGTHS)
    errors = []
    for ours, document in zip(packed, tokens, strict=True):
        theirs = oracle(document[None]).logits[0]
        assert ours.shape == theirs.shape
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
        errors.append(float((ours - theirs).abs().max()))
        alone = decoder(document, [len(document)])
        assert float((ours - alone).abs().max()) <= BOUND
    return max(errors)


def report(name: str, error: float) -> None:
    print(f"\n{name}: max abs error {error:.1e}")
    assert error <= BOUND


@each_model
def test_transformers_reads_what_we_write(
    tmp_path: Path, model: ModelSpec, request: pytest.FixtureRequest
) -> None:
    decoder = Decoder(model)
    decoder.load_state_dict(state_of(model), strict=not model.experts)  # counts are no weights
    write_hf(tmp_path / "hf", model, decoder.state_dict(), max_shard_bytes=40_000)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    oracle, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(told.values()), told
    assert oracle.dtype == torch.float32
    assert sum(weight.numel() for weight in oracle.parameters()) == model.params
    report(request.node.callspec.id, largest_error(decoder, oracle.eval()))


@each_model
def test_we_read_what_transformers_writes(
    tmp_path: Path, model: ModelSpec, request: pytest.FixtureRequest
) -> None:
    # Its own configuration, built by hand: nothing of hf_config may vouch for itself here.
    kind = "qwen2" if model.qkv_bias else "qwen3" if model.qk_norm else "llama"
    if model.experts:
        kind = "qwen2_moe" if model.qkv_bias else "mixtral"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    config = transformers.AutoConfig.for_model(
        kind,
        num_hidden_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_width,
        intermediate_size=model.ffn,
        vocab_size=model.vocab,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tied,
        rope_parameters=rope,
        max_position_embeddings=256,
        pad_token_id=None,
        **EXPERTS.get(kind, {}),
    )
    oracle = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_()
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
    oracle.save_pretrained(tmp_path / "hf")
    read, _ = read_hf(tmp_path / "hf")
    assert read == model
    decoder = Decoder(read)
    load_hf(decoder, tmp_path / "hf")
    report(request.node.callspec.id, largest_error(decoder, oracle))


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    model = FAMILIES["qwen3"]
    decoder = Decoder(model)
    decoder.load_state_dict(state_of(model), strict=not model.experts)  # counts are no weights
    write_hf(tmp_path / "hf", model, decoder.state_dict())
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").train()
    tokens = documents(model)
    decoder(torch.cat(tokens), LENGTHS, labels_T=torch.cat(tokens)).backward()
    for document in tokens:
        torch.nn.functional.cross_entropy(
            oracle(document[None]).logits[0], document, reduction="sum"
        ).backward()
    theirs = list(oracle.parameters())
    ours = list(decoder.parameters())
    assert len(ours) == len(theirs)
    # save_pretrained gives the gradients our names, by the same table as the weights.
    with torch.no_grad():
        for weight in theirs:
            assert weight.grad is not None
            weight.copy_(weight.grad)
    oracle.save_pretrained(tmp_path / "gradients")
    _, expected = read_hf(tmp_path / "gradients")
    errors = {
        name: float((weight.grad - expected[name]).abs().max() / expected[name].abs().max())
        for name, weight in decoder.named_parameters()
        if weight.grad is not None
    }
    assert errors.keys() == expected.keys()
    report(
        f"gradients relative to their largest, {max(errors, key=lambda name: errors[name])}",
        max(errors.values()),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_arrive_as_such(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: weight.to(dtype) for name, weight in state_of(PLAIN).items()}
    write_hf(tmp_path / "hf", PLAIN, state)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert oracle.dtype == dtype


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    texts = ["def f(x):\n    return  x ** 12\n", "naïve 你好 \t\r\n<|end|>", ""]
    file = tmp_path / "tokenizer.json"
    train_tokenizer(texts * 3, 300, file)
    core = tokenizers.Tokenizer.from_file(str(file))
    model = dataclasses.replace(PLAIN, vocab=core.get_vocab_size())
    kept = files_to_keep(None, file)
    trained = TrainedModel(
        Path("run"), model, state_of(model), kept.files, context_tokens=77, remarks=kept.remarks
    )
    written = write_folder(trained, tmp_path / "hf")
    assert (written.model_type, written.dtype, written.remarks) == ("llama", "fp32", ())
    assert (written.has_tokenizer, written.has_template) == (True, False)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in texts:
        assert loaded(text).input_ids == core.encode(text).ids
        assert loaded.decode(loaded(text).input_ids) == text
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|end|>", core.token_to_id("<|end|>"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == loaded.eos_token_id
    assert config["bos_token_id"] is None
    assert config["max_position_embeddings"] == 77
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert generation.eos_token_id == loaded.eos_token_id
