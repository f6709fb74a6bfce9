"""Published models by name, as ``ModelSpec``.

What it decides
    ``PRESETS`` can be trained here. ``PLANNED`` adds models that can only be planned, priced and
    simulated: feed-forwards without a gate, latent attention, windows.

Kept true (tests/unit/spec/model/test_presets.py)
    Sizes are the published ones.

Sources
    Llama 2: arXiv:2307.09288. Llama 3: arXiv:2407.21783, table 3. Llama 3.1 rope scaling: the
    published config.json of each model. Qwen 2, 2.5 and 3: the published config.json of each
    model. Mixtral: arXiv:2401.04088, table 1, and the 8x22B's config.json. SmolLM2: its
    config.json. GPT-3: arXiv:2005.14165, table 2.1, with the vocabulary of Megatron-LM's
    recipes. DeepSeek-V3: arXiv:2412.19437, section 4.2; its multi-token prediction, one more
    layer of training, is left out. GPT-OSS: its config.json. GPT-like small presets are ours.
"""

import dataclasses

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.spec.model.sizes import Balance as Balance
from equipoise.spec.model.sizes import LatentSpec as LatentSpec
from equipoise.spec.model.sizes import ModelSpec as ModelSpec
from equipoise.spec.model.sizes import RopeScaling as RopeScaling
from equipoise.spec.model.sizes import WindowSpec as WindowSpec


def _llama3(
    layers: int, hidden: int, heads: int, ffn: int, *, head_width: int = 128, tied: bool = False
) -> ModelSpec:
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128_256,
        head_width=head_width,
        tied=tied,
        rope_theta=500_000.0,
        norm_eps=1e-5,
    )


def _llama31(base: ModelSpec, factor: float = 8.0) -> ModelSpec:
    return dataclasses.replace(base, rope_scaling=RopeScaling(factor, 1.0, 4.0, 8192))


def _llama2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelSpec:
    return _small(layers, hidden, heads, kv_heads, ffn, 32_000, tied=False)


def _qwen25(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, vocab: int, tied: bool
) -> ModelSpec:
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        head_width=hidden // heads,
        tied=tied,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qkv_bias=True,
    )


def _small(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, tied: bool
) -> ModelSpec:
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        head_width=hidden // heads,
        tied=tied,
    )


def _qwen3_moe(layers: int, hidden: int, heads: int, expert_ffn: int) -> ModelSpec:
    base = _qwen25(layers, hidden, heads, 4, 3 * hidden, vocab=151_936, tied=False)
    return dataclasses.replace(
        base,
        head_width=128,
        qkv_bias=False,
        qk_norm=True,
        experts=128,
        top_k=8,
        expert_ffn=expert_ffn,
    )


PRESETS: dict[str, ModelSpec] = {
    "2m": _small(4, 128, 4, 2, 352, 4096, tied=False),
    "7m": _small(6, 256, 4, 2, 704, 4096, tied=False),
    "30m": _small(8, 512, 8, 4, 1408, 8192, tied=False),
    "120m": _small(12, 768, 12, 4, 2048, 32_768, tied=True),
    "moe-3m": dataclasses.replace(
        _small(4, 128, 4, 2, 176, 4096, tied=False), experts=8, top_k=2, expert_ffn=176
    ),
    "smollm2-135m": dataclasses.replace(
        _small(30, 576, 9, 3, 1536, 49_152, tied=True), rope_theta=100_000.0
    ),
    "llama3.2-1b": _llama31(_llama3(16, 2048, 32, 8192, head_width=64, tied=True), 32.0),
    "llama2-7b": _llama2(32, 4096, 32, 32, 11_008),
    "llama2-13b": _llama2(40, 5120, 40, 40, 13_824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28_672),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248),
    "llama3.1-8b": _llama31(_llama3(32, 4096, 32, 14_336)),
    "llama3.1-70b": _llama31(_llama3(80, 8192, 64, 28_672)),
    "llama3.1-405b": _llama31(_llama3(126, 16_384, 128, 53_248)),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, vocab=151_936, tied=True),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, vocab=151_936, tied=True),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11_008, vocab=151_936, tied=True),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18_944, vocab=152_064, tied=False),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13_824, vocab=152_064, tied=False),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27_648, vocab=152_064, tied=False),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29_568, vocab=152_064, tied=False),
    "qwen3-8b": dataclasses.replace(
        _qwen25(36, 4096, 32, 8, 12_288, vocab=151_936, tied=False), qkv_bias=False, qk_norm=True
    ),
    "mixtral-8x7b": dataclasses.replace(
        _small(32, 4096, 32, 8, 14_336, 32_000, tied=False),
        rope_theta=1_000_000.0,
        experts=8,
        top_k=2,
        expert_ffn=14_336,
    ),
    "mixtral-8x22b": dataclasses.replace(
        _small(56, 6144, 48, 8, 16_384, 32_768, tied=False),
        rope_theta=1_000_000.0,
        experts=8,
        top_k=2,
        expert_ffn=16_384,
    ),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 1536),
    "qwen2-57b-a14b": dataclasses.replace(
        _qwen25(28, 3584, 28, 4, 18_944, vocab=151_936, tied=False),
        experts=64,
        top_k=8,
        expert_ffn=2560,
        shared_ffn=20_480,
        shared_gate=True,
        norm_top_k=False,
    ),
}


PLANNED: dict[str, ModelSpec] = {
    **PRESETS,
    "gpt3-175b": dataclasses.replace(
        _small(96, 12_288, 96, 96, 49_152, 51_200, tied=True), gated=False
    ),
    "deepseek-v3": dataclasses.replace(
        _small(61, 7168, 128, 128, 18_432, 129_280, tied=False),
        head_width=128,
        latent=LatentSpec(query=1536, key_value=512, rope=64),
        experts=256,
        top_k=8,
        expert_ffn=2048,
        shared_ffn=2048,
        dense_layers=3,
        expert_groups=8,
        kept_groups=4,
        balance="bias",
    ),
    "gpt-oss-120b": dataclasses.replace(
        _small(36, 2880, 64, 8, 2880, 201_088, tied=False),
        head_width=64,
        rope_theta=150_000.0,
        qkv_bias=True,
        experts=128,
        top_k=4,
        expert_ffn=2880,
        window=WindowSpec(128, 0.5),
        has_sinks=True,
    ),
}
"""Every model that can be planned and simulated."""


def preset(name: str) -> ModelSpec:
    """The ModelSpec of a published or built-in model.

    Raises:
        SpecError: no such preset; names the nearest.

    >>> preset("llama3-405b").params
    405853388800
    """
    try:
        return PRESETS[name]
    except (KeyError, TypeError):
        raise SpecError(
            f'No model preset is called "{name}". Nearest: {nearest(str(name), PRESETS)}. '
            f"All: {', '.join(PRESETS)}."
        ) from None
