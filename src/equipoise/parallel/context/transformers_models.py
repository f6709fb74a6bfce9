"""Which models of ``transformers`` are exact over ranks: proven by a test, or tried out now.

Why
    Models differ in ways that their configuration does not show: some count positions from another
    number, some build their own masks, some do not pass a pack on to their attention.

What it decides
    Architectures whose logits and gradients a test has compared with one rank are accepted at once.
    Any other model is tried out with its own weights on a few short documents, twice forward and
    backward, and refused if it differs.

Kept true (tests/oracle/hf/test_hf_models.py)
    Each causal language model of the installed transformers is exact over ranks, or refused here.
"""

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from equipoise.base.errors import CheckError, LayoutError, ModelError
from equipoise.parallel.context.transformers_trial import packs_to_try, try_over_ranks

_DECODERS = """
    Arcee BitNet Cohere2 Cohere2Moe Cohere Cwm DeepseekV2 DeepseekV3 Ernie4_5_Moe Ernie4_5 Exaone4
    ExaoneMoe FlexOlmo Gemma2 Gemma3 Gemma Glm4 Glm4Moe Glm4MoeLite Glm GPTBigCode GPTNeoX GptOss
    Granite GraniteMoe GraniteMoeShared GraniteMoeSWA GraniteSWA Helium HunYuanDenseV1 HunYuanMoEV1
    HyperCLOVAX HYV3 Jais2 Llama MiMoV2Flash MiniCPM3 MiniMaxM2 Ministral3 Ministral Mistral
    Mixtral Olmo2 Olmo3 Olmoe Olmo OPT Phi3 Phi Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe SeedOss
    SmolLM3 SolarOpen Starcoder2 VaultGemma
"""

PROVEN = frozenset(f"{each}ForCausalLM" for each in _DECODERS.split()) | {"GPT2LMHeadModel"}
"""Architectures of transformers 5.23 that the test has compared with one rank."""

_TRIED_TOKENS = (9, 1, 6)
"""Documents of a trial: shorter than any usual chunk or window."""


def require_exact(model: PreTrainedModel) -> None:
    """Refuse a model that is neither proven exact over ranks nor exact when tried out.

    Raises:
        ModelError: it differs from one rank, cannot run over ranks, or cannot be tried out.
    """
    name = type(model).__name__
    if name in PROVEN and type(model).__module__.startswith("transformers."):
        return
    weights = list(model.parameters())
    if any(each.is_meta or isinstance(each, DTensor) for each in weights):
        raise ModelError(
            f"{name} has not been proven exact over ranks, and cannot be tried out while its "
            f"weights are sharded or on the meta device. Call use_context_parallelism after "
            f"loading the weights and before sharding them."
        )
    is_half = any(x.dtype in (torch.bfloat16, torch.float16) for x in weights)
    packs = packs_to_try(model.config.get_text_config(), _TRIED_TOKENS)
    try:
        try_over_ranks(model, packs, 0.1 if is_half else 1e-3, short_windows=False)
    except CheckError as error:
        noise = " Rounding in 16 bits may be the cause: build it in fp32 to be sure."
        raise ModelError(f"{error}{noise if is_half else ''}") from error
    except LayoutError as error:
        reason = str(error).split(". ")[0]
        raise ModelError(
            f"{name} would not be exact over ranks: {reason}. Train it without context parallelism."
        ) from error
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ModelError(
            f"{name} could not be tried out over ranks; that ended in {type(error).__name__}: "
            f"{reason} Train it without context parallelism."
        ) from error
