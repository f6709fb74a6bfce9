"""A decoder's sizes, and nothing that can be executed.

Why
    Packing, prices, memory forecasts and the model itself must agree on what the model is.
    They all read this one dataclass.

Sources
    Llama 3: arXiv:2407.21783, table 3. Llama 3.1 rope scaling: the published config.json of
    each model. Qwen 2.5 and 3: the published config.json of each model. SmolLM2: its
    config.json. GPT-like small presets are ours.
"""

import dataclasses
from dataclasses import dataclass

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of slow rotary frequencies.

    Source: Llama 3.1 config.json, ``rope_scaling`` of type ``llama3``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_tokens: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a pre-norm decoder with RoPE, grouped-query attention and SwiGLU."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_width: int
    tied: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def layer_matmul_params(self) -> int:
        """Weights of one layer that multiply every token (biases and norms left out)."""
        attention = self.hidden * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def matmul_params(self) -> int:
        """Weights that multiply every token: the layers' and the head's, no embedding look-up."""
        return self.layers * self.layer_matmul_params + self.hidden * self.vocab

    @property
    def layer_params(self) -> int:
        """Every weight of one layer."""
        biases = self.head_width * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_width if self.qk_norm else 0)
        return self.layer_matmul_params + biases + norms

    @property
    def params(self) -> int:
        """Every weight of the model, a tied head counted once."""
        tables = self.hidden * self.vocab * (1 if self.tied else 2)
        return self.layers * self.layer_params + tables + self.hidden

    @property
    def break_even_tokens(self) -> float:
        """Document length at which causal attention costs as many FLOP as the linear layers.

        Linear layers do ``2 P`` FLOP a token and a layer; causal attention over a document
        of ``l`` tokens does ``2 H E l**2`` in all. They meet at ``l = P / (H E)``.
        """
        return self.layer_matmul_params / (self.heads * self.head_width)

    def scaled(self, *, layers: int | None = None, hidden: int | None = None) -> "ModelSpec":
        """The same shape, smaller: fewer layers, or narrower with every width in proportion.

        Raises:
            SpecError: the width is not a multiple of twice the number of heads.
        """
        changed = self if layers is None else dataclasses.replace(self, layers=layers)
        if hidden is None:
            return changed
        if hidden % (2 * self.heads):
            raise SpecError(
                f"A width of {hidden} does not divide over {self.heads} heads of an even width. "
                f"Nearest that does: {max(1, hidden // (2 * self.heads)) * 2 * self.heads}."
            )
        return dataclasses.replace(
            changed,
            hidden=hidden,
            head_width=hidden // self.heads,
            ffn=max(8, self.ffn * hidden // self.hidden // 8 * 8),
        )


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


PRESETS: dict[str, ModelSpec] = {
    "2m": _small(4, 128, 4, 2, 352, 4096, tied=False),
    "7m": _small(6, 256, 4, 2, 704, 4096, tied=False),
    "30m": _small(8, 512, 8, 4, 1408, 8192, tied=False),
    "120m": _small(12, 768, 12, 4, 2048, 32_768, tied=True),
    "smollm2-135m": ModelSpec(
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        ffn=1536,
        vocab=49_152,
        head_width=64,
        tied=True,
        rope_theta=100_000.0,
    ),
    "llama3.2-1b": _llama31(_llama3(16, 2048, 32, 8192, head_width=64, tied=True), 32.0),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248),
    "llama3.1-8b": _llama31(_llama3(32, 4096, 32, 14_336)),
    "llama3.1-70b": _llama31(_llama3(80, 8192, 64, 28_672)),
    "llama3.1-405b": _llama31(_llama3(126, 16_384, 128, 53_248)),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, vocab=151_936, tied=True),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18_944, vocab=152_064, tied=False),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29_568, vocab=152_064, tied=False),
    "qwen3-8b": ModelSpec(
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=12_288,
        vocab=151_936,
        head_width=128,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qk_norm=True,
    ),
}


def preset(name: str) -> ModelSpec:
    """The ModelSpec of a published or built-in model.

    Raises:
        SpecError: no such preset; names the nearest.

    >>> preset("llama3-405b").params
    405853388800
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise SpecError(
            f'No model preset is called "{name}". Nearest: {nearest(name, PRESETS)}. '
            f"All: {', '.join(PRESETS)}."
        ) from None
