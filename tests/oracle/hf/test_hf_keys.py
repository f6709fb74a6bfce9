"""Every key of transformers' configuration classes: the same defaults, and obeyed or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from equipoise.base.errors import ModelError
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.read import load_hf, read_hf
from equipoise.spec.model.hf_config import MODEL_TYPES, model_from_hf_config
from equipoise.spec.model.hf_keys import IGNORED, ONLY, READ

BOUND = 1e-5
TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TINY_OF = {
    "mistral": {"sliding_window": None},
    "phi3": {"pad_token_id": None},
    "qwen3_moe": {
        "num_local_experts": 10,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Other values of keys for which "the next number" or "the other flag" is none that loads.
OTHERS: dict[str, list[Any]] = {
    "hidden_size": [64],
    "intermediate_size": [32],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4, None],
    "head_dim": [16, None],
    "hidden_act": ["gelu", "relu"],
    "sliding_window": [5],
    "layer_types": [
        ["full_attention", "sliding_attention"],
        ["full_attention", "full_attention"],
    ],
    "max_window_layers": [0, 1],
    "mlp_only_layers": [[0], [1], [0, 1]],
    "decoder_sparse_step": [2],
    "num_experts_per_tok": [1, 3],
    "num_experts": [5],
    "num_local_experts": [5],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 77.0},
        {**LLAMA3, "rope_theta": 50.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
    ],
    "rope_scaling": [LLAMA3, {"type": "linear", "factor": 2.0}],
    "rope_theta": [77.0],
    "partial_rotary_factor": [0.5],
    "initializer_range": [0.5],
    "rms_norm_eps": [0.03],
    "attention_dropout": [0.25],
    "router_jitter_noise": [0.25],
    "dtype": ["float32"],
    "id2label": [{0: "no"}],
    "label2id": [{"no": 0}],
    "problem_type": ["regression"],
    "architectures": [["SomethingElse"]],
    "is_causal": [False],
    "pretraining_tp": [2],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "per_layer_config": [{"1": {"intermediate_size": 24}}],
    "bos_token_id": [3],
    "eos_token_id": [3],
    "pad_token_id": [3],
}
# Of no class, but keys that transformers reads wherever they stand.
EXTRA = ("head_dim", "rope_scaling", "rope_theta", "partial_rotary_factor", "is_causal")
# Set by transformers itself, or with another value it writes or runs nothing.
NOT_MUTATED = {"model_type", "transformers_version", "label2id", "output_attentions", "return_dict"}


def tiny(kind: str) -> dict[str, Any]:
    return TINY | TINY_OF.get(kind, {})


def other_values(name: str, value: Any) -> list[Any]:
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    return ["other"]


def every_mutation() -> list[tuple[str, str, Any]]:
    cases = []
    for kind in MODEL_TYPES:
        said = AutoConfig.for_model(kind, **tiny(kind)).to_dict()
        for name in sorted(said.keys() | set(EXTRA) | {"quantization_config"}):
            if name not in NOT_MUTATED:
                cases += [(kind, name, each) for each in other_values(name, said.get(name))]
    return cases


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_key_of_a_class_is_known_and_its_default_is_ours(kind: str) -> None:
    theirs = AutoConfig.for_model(kind).to_dict()
    ignored = set(" ".join(IGNORED.values()).split())
    assert set(theirs) <= READ[kind].keys() | ONLY.keys() | ignored
    assert GenerationConfig._get_default_generation_params().keys() <= ignored
    rope = theirs.pop("rope_parameters")
    assert rope.pop("partial_rotary_factor", 1.0) == 1.0
    assert rope == {"rope_type": "default", "rope_theta": READ[kind]["rope_theta"]}
    ours = READ[kind] | {name: only[0] for name, only in ONLY.items()}
    for name, default in ours.items():
        if name in theirs and theirs[name] != default:
            # What a class works out of other keys; None stands for that here.
            worked_out = {
                "num_key_value_heads": theirs["num_attention_heads"],
                "head_dim": theirs["hidden_size"] // theirs["num_attention_heads"],
                "layer_types": ["full_attention"] * theirs["num_hidden_layers"],
                "mlp_only_layers": [],
                "sliding_window": None if kind != "qwen2_moe" else 0,
            }
            assert theirs[name] == worked_out[name], name
            assert default is None or name == "sliding_window"


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_an_absent_key_means_what_it_means_to_transformers(kind: str) -> None:
    whole = AutoConfig.for_model(kind, **tiny(kind), rms_norm_eps=0.01).to_dict()
    whole.pop("layer_types", None)  # as many as there are layers
    compared = 0
    for name in [*sorted(whole.keys() - {"model_type"}), None]:
        given = {key: value for key, value in whole.items() if key != name}
        if name is None:
            given = {"model_type": kind}
        theirs = AutoConfig.for_model(**given)
        try:
            ours = model_from_hf_config(given)
        except ModelError:
            # Heads that do not divide by what the class takes, or mistral's window.
            assert name in (None, "num_attention_heads", "num_key_value_heads", "sliding_window")
            continue
        assert ours == model_from_hf_config(theirs.to_dict()), name
        compared += 1
    assert compared >= len(whole) - 3


# 250 models of 50,000 weights, built, saved and read twice each: 20 ms apiece.
@torch.no_grad()
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_changed_key_is_obeyed_or_refused(tmp_path: Path, kind: str) -> None:
    tokens = torch.randint(TINY["vocab_size"], (1, 40))
    obeyed, refused = set[str](), set[str]()
    for number, (of, name, value) in enumerate(every_mutation()):
        if of != kind:
            continue
        folder = tmp_path / f"{number}"
        try:
            config = AutoConfig.for_model(kind, **(tiny(kind) | {name: value}))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # transformers refuses in many ways
            print(f"{kind}: transformers has no {name} = {value} ({type(error).__name__})")
            said = AutoConfig.for_model(kind, **tiny(kind)).to_dict() | {name: value}
            try:
                model_from_hf_config(said)
            except ModelError as refusal:
                assert name in str(refusal)
                refused.add(name)
            continue
        for weight in model.parameters():
            weight.normal_(0.0, 0.3)
        model.save_pretrained(folder)
        said = json.loads((folder / "config.json").read_text())
        if name not in said and name not in ("rope_scaling", "rope_theta"):
            (folder / "config.json").write_text(json.dumps(said | {name: value}))
        try:
            sizes, _ = read_hf(folder)
        except ModelError as error:
            words = str(error)
            assert name in words or "rope_parameters" in words, (name, value, words)
            refused.add(name)
            continue
        ours = Decoder(sizes)
        load_hf(ours, folder)
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        expected = theirs(tokens).logits[0]
        error = (ours(tokens[0], [tokens.shape[1]]) - expected).abs().max()
        assert float(error) <= BOUND * float(expected.abs().max()), (name, value, float(error))
        obeyed.add(name)
    print(f"{kind}: obeyed {sorted(obeyed)}, refused {sorted(refused)}")
    assert {"rms_norm_eps", "hidden_size", "rope_theta", "tie_word_embeddings"} <= obeyed
    known = AutoConfig.for_model(kind).to_dict().keys() | {"quantization_config", "is_causal"}
    never = {"hidden_act", "quantization_config", "is_causal", "attention_dropout"}
    assert never & known <= refused
