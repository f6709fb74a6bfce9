"""Every causal language model of transformers: exact over ranks, or refused before it trains.

It builds some 150 models, which takes a minute: a list of names proves nothing.
"""

import pytest
import torch
import transformers

from equipoise.base.errors import ModelError
from equipoise.parallel.context.transformers import use_context_parallelism
from equipoise.parallel.context.transformers_check import check_context_parallelism
from equipoise.parallel.context.transformers_models import PROVEN
from support.hf.models import KINDS, build_tiny

# Their configurations need more than sizes. ``use_context_parallelism`` tries them out when it
# meets one, as it does any model that is not in PROVEN.
_NOT_BUILT = """
    bamba blt cohere_compass_text dbrx dots1 dots3_note dots3_note_text emu3 falcon_h1 fuyu
    gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant got_ocr2
    granitemoehybrid lfm2_moe llama4 mamba2 mllama moss_transcribe_diarize musicgen
    musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp qwen4_exp_text
    recurrent_gemma reformer zamba zaya
"""
NOT_BUILT = set(_NOT_BUILT.split())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_BUILT])
def test_a_model_is_exact_or_refused(kind: str) -> None:
    model = build_tiny(kind)
    before = model.config._attn_implementation
    try:
        use_context_parallelism(model)
    except ModelError as error:
        assert type(model).__name__ not in PROVEN
        assert str(error).split()[0] == type(model).__name__ or "The loss of " in str(error)
        assert str(error).endswith(".")
        assert "shard_batch" not in str(error)
        assert model.config._attn_implementation == before
        return
    assert check_context_parallelism(model) <= 1e-3


def test_proven_models_are_among_those_built() -> None:
    built = {
        transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        for kind in KINDS
        if kind not in NOT_BUILT
    }
    assert built >= PROVEN


REFUSED = {
    "roberta": "RobertaForCausalLM over 2 ranks differs from its documents one by one by ",
    "stablelm": "StableLmForCausalLM would not be exact over ranks: StableLmAttention was called "
    "without a pack. Train it without context parallelism.",
    "nemotron": "NemotronForCausalLM would not be exact over ranks: NemotronAttention was called "
    "without a pack. Train it without context parallelism.",
    "bart": "BartForCausalLM would not be exact over ranks: The model's mask is not the causal "
    "one, the only one that attention over ranks computes. Train it without context parallelism.",
    "whisper": "The loss of WhisperForCausalLM differs by nan from the cross entropy of its logits "
    "and shift_labels, and 1.0e-03 is allowed. It has labels or losses of its own: train it "
    "without context parallelism.",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_refused_model_is_refused_for(kind: str) -> None:
    with pytest.raises(ModelError) as caught:
        use_context_parallelism(build_tiny(kind))
    assert str(caught.value).startswith(REFUSED[kind])


def test_a_model_of_ones_own_is_tried_out() -> None:
    class Mine(transformers.LlamaForCausalLM):
        pass

    model = Mine(build_tiny("llama").config)
    weights = [each.clone() for each in model.parameters()]
    use_context_parallelism(model)
    assert model.config._attn_implementation == "equipoise"
    assert all(each.grad is None for each in model.parameters())
    assert all(map(torch.equal, weights, model.parameters()))
    with torch.device("meta"):
        empty = Mine(model.config)
    empty.set_attn_implementation("sdpa")
    with pytest.raises(ModelError) as caught:
        use_context_parallelism(empty)
    assert str(caught.value) == (
        "Mine has not been proven exact over ranks, and cannot be tried out while its weights "
        "are sharded or on the meta device. Call use_context_parallelism after loading the "
        "weights and before sharding them."
    )
