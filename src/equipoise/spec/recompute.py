"""What each layer keeps for its backward, by the run's setting ``train.recompute``.

What it decides
    ``D`` is the model's width, ``q`` and ``k`` the widths of all query and of all key heads, ``F``
    the feed-forward's; numbers are what a dense layer keeps per token, without norms' scales:

    ===========  ================================  ============================================
    setting      keeps                             runs again in the backward
    ===========  ================================  ============================================
    none         4 D + 2 q + 2 k + 2 F             nothing
    attention    4 D + q + 2 k + 2 F               the attention core and the output projection
    selective    D + 2 q + 2 k                     all but the attention core
    full         D                                 the layer
    every-N      as full in each N-th layer, as    each N-th layer
                 none in the others
    ===========  ================================  ============================================

    The attention core is the quadratic part. Its scores are never kept (flash attention
    recomputes them in every backward), which was most of what Korthikanti's selective
    recomputation saved; ``attention`` recomputes the rest, the core's output and its
    log-sum-exps. ``selective`` is the opposite: the core's results are kept, so its work, and
    with context parallelism its messages, are never repeated, however long the documents.

    Other programs recompute *modules* of a layer, by Megatron-Core's names joined with ``+``. Own
    runs do not, and are refused. Each drops what only its own end gives:

    ==============  =================================  ======================================
    module          no longer keeps                    runs again in the backward
    ==============  =================================  ======================================
    layernorm       outputs of norms that are kernels  those norms
                    of their own
    mla_up_proj     queries, keys and values of        their products from the latent
                    latent attention                   vectors, and the rotation
    core_attn       as ``attention``                   the attention core
    mlp             all of a dense feed-forward, its   the norm and the feed-forward
                    normed input too
    moe_act         experts' hidden units after the    the activation
                    activation
    shared_experts  the shared expert's hidden units   the shared expert
    moe             all of a sparse feed-forward but   router, dispatch, experts and return
                    its normed input
    ==============  =================================  ======================================

    A plan chooses among single modules and among the first few rungs of a ladder together. It rises
    from mlp (1 ms for a GiB of DeepSeek-V3 in FP8 on H100, as priced here) over mla_up_proj (20),
    layernorm (43), moe_act (62) and shared_experts (180) to moe (470); the first two are NVIDIA's
    recipe for that model. The core is not on it: with flash attention it frees next to nothing. Any
    other set is planned where it is given.

Kept true (tests/unit/nn/test_decoder.py, tests/unit/cost/memory/test_layer.py,
tests/unit/cost/memory/test_modules.py, tests/unit/cost/step/test_modules.py)
    Loss and gradients are bitwise those of ``none``; the core runs as often, and a layer keeps as
    much, as stated here. A module's time and bytes are those of the table.

Sources
    Attention core: Korthikanti et al., arXiv:2205.05198, section 5. Keeping the core's results:
    DistFlashAttn, arXiv:2310.03294, section 3.3. Every k-th layer: Megatron-LM's
    ``--recompute-num-layers``. Modules: Megatron-LM core 0.19,
    megatron/core/transformer/transformer_config.py, ``recompute_modules``;
    transformer_layer.py, multi_latent_attention.py and moe/experts.py for what each drops.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Literal, get_args, overload

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import Recompute

LayerRecompute = Literal["none", "attention", "selective", "full"]
"""What a single layer of an own run does; of other programs it may be modules."""

OWN: tuple[Recompute, ...] = get_args(Recompute)
"""Settings of own runs."""

Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
MODULES: tuple[Module, ...] = get_args(Module)
"""Modules that can be computed again, in the order of their names."""

MODULE_SETS: tuple[str, ...] = tuple(
    "+".join(some)
    for size in range(1, len(MODULES) + 1)
    for some in itertools.combinations(MODULES, size)
)
"""Every setting of modules."""

_LADDER: tuple[Module, ...] = (
    *("mlp", "mla_up_proj", "layernorm", "moe_act", "shared_experts", "moe"),
)
"""Modules that a plan chooses among, those that give most bytes for a second first."""

_WITHIN: dict[Module, tuple[Module, ...]] = {"moe": ("moe_act", "shared_experts")}
"""Modules that another one contains."""


@functools.cache
def modules_of(setting: str) -> frozenset[Module]:
    """Modules that a setting computes again; none of a setting of whole layers.

    >>> sorted(modules_of("moe_act+layernorm")), sorted(modules_of("full"))
    (['layernorm', 'moe_act'], [])
    """
    named = setting.split("+")
    return frozenset(each for each in MODULES if each in named)


def names_modules(value: object) -> bool:
    """Whether a value is a setting of modules, in any order.

    >>> names_modules("moe_act+layernorm"), names_modules("full"), names_modules(1)
    (True, False, False)
    """
    return isinstance(value, str) and set(value.split("+")) <= set(MODULES)


def refuse_modules(setting: str) -> str:
    """Why an own run does not recompute modules, and what it can recompute."""
    own = ", ".join(f'"{each}"' for each in OWN)
    return (
        f'"{setting}" names modules of a layer, and train recomputes a layer, its attention core, '
        f"or all but that core. Give one of {own}."
    )


def read_recompute(text: str) -> str:
    """A setting as it is written, with its modules in order.

    Raises:
        SpecError: a name is unknown, or given twice.

    >>> read_recompute("moe_act+layernorm")
    'layernorm+moe_act'
    """
    if text in OWN:
        return text
    named = text.split("+")
    known = (*OWN, *MODULES) if len(named) == 1 else MODULES
    for at, each in enumerate(named):
        if each not in known:
            raise SpecError(
                f'recompute: "{each}" is not one of {", ".join(known)}. Nearest: '
                f'"{nearest(each, known)}". Modules are joined with +, as layernorm+moe_act.'
            )
        if each in named[:at]:
            raise SpecError(f'recompute: "{text}" names {each} twice. Name it once.')
    return "+".join(sorted(named))


def absent_modules(setting: str, model: ModelSpec) -> dict[str, str]:
    """Modules of a setting that a model does not have, with what it would need.

    >>> from equipoise.spec.model.presets import PLANNED
    >>> absent_modules("mla_up_proj+mlp", PLANNED["llama3-8b"])
    {'mla_up_proj': 'latent attention'}
    """
    needs = {
        "mla_up_proj": (model.latent is not None, "latent attention"),
        "mlp": (model.sparse_layers < model.layers, "dense layers"),
        "moe": (model.sparse_layers > 0, "experts"),
        "moe_act": (model.sparse_layers > 0, "experts"),
        "shared_experts": (model.shared_ffn > 0, "a shared expert"),
    }
    return {
        name: what for name, (has, what) in needs.items() if name in modules_of(setting) and not has
    }


def require_modules(setting: str, model: ModelSpec) -> None:
    """Refuse modules that a model does not have.

    Raises:
        SpecError: names them, and what they need.
    """
    for name, what in absent_modules(setting, model).items():
        left = "+".join(each for each in setting.split("+") if each != name) or "none"
        raise SpecError(
            f"recompute {setting}: {name} needs {what}, and the model has none. Give {left}."
        )


def planned_modules(model: ModelSpec, modules: Sequence[str] | None) -> tuple[str, ...]:
    """Settings of modules that a plan chooses among.

    Args:
        model: Its layers have some of the modules.
        modules: Those of the program; None has all.

    >>> from equipoise.spec.model.presets import PLANNED
    >>> planned_modules(PLANNED["qwen3-235b-a22b"], None)
    ('layernorm', 'moe_act', 'moe', 'layernorm+moe_act', 'layernorm+moe')
    """
    here = [each for each in _LADDER if modules is None or each in modules]
    here = [each for each in here if not absent_modules(each, model)]
    if model.latent is None and not model.sparse_layers:  # every norm is a part of a product
        here = [each for each in here if each != "layernorm"]
    settings = dict.fromkeys(map(str, here))
    for rungs in range(2, len(here) + 1):
        some = here[:rungs]
        within = {each for whole in some for each in _WITHIN.get(whole, ())}
        settings["+".join(sorted(set(some) - within))] = None
    return tuple(settings)


def repeats_layer(how: str) -> bool:
    """Whether a layer computes all but its attention core again."""
    return how in ("full", "selective")


def repeats_core(how: str) -> bool:
    """Whether a layer computes its attention core again.

    >>> [each for each in ("none", "selective", "full", "core_attn+mlp") if repeats_core(each)]
    ['full', 'core_attn+mlp']
    """
    return how in ("full", "attention") or "core_attn" in modules_of(how)


@overload
def layer_recompute(setting: Recompute, layer: int) -> LayerRecompute: ...


@overload
def layer_recompute(setting: str, layer: int) -> str: ...


def layer_recompute(setting: str, layer: int) -> str:
    """What a layer does, counted from 0 in the whole model.

    >>> [layer_recompute("every-2", layer) for layer in range(4)]
    ['none', 'full', 'none', 'full']
    """
    if setting.startswith("every-"):
        every = int(setting.removeprefix("every-"))
        return "full" if (layer + 1) % every == 0 else "none"
    return setting


def linear_repeats(setting: str, layers: int) -> int:
    """How many of ``layers`` layers rerun everything except the attention core.

    >>> linear_repeats("selective", 6), linear_repeats("every-2", 6), linear_repeats("none", 6)
    (6, 3, 0)
    """
    kinds = [layer_recompute(setting, layer) for layer in range(layers)]
    return sum(map(repeats_layer, kinds))


def attention_repeats(setting: str, layers: int) -> int:
    """How many of ``layers`` layers rerun the attention core and its messages.

    >>> attention_repeats("selective", 6), attention_repeats("every-2", 6)
    (0, 3)
    """
    kinds = [layer_recompute(setting, layer) for layer in range(layers)]
    return sum(map(repeats_core, kinds))
