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

Kept true (tests/unit/nn/test_decoder.py, tests/unit/cost/memory/test_layer.py)
    Loss and gradients are bitwise those of ``none``; the core runs as often, and a layer keeps as
    much, as stated here.

Sources
    Attention core: Korthikanti et al., arXiv:2205.05198, section 5. Keeping the core's results:
    DistFlashAttn, arXiv:2310.03294, section 3.3. Every k-th layer: Megatron-LM's
    ``--recompute-num-layers``.
"""

from typing import Literal

from equipoise.spec.run.spec import Recompute

LayerRecompute = Literal["none", "attention", "selective", "full"]
"""What a single layer does."""


def layer_recompute(setting: Recompute, layer: int) -> LayerRecompute:
    """What a layer does, counted from 0 in the whole model.

    >>> [layer_recompute("every-2", layer) for layer in range(4)]
    ['none', 'full', 'none', 'full']
    """
    if setting == "every-2" or setting == "every-3" or setting == "every-4":
        every = int(setting.removeprefix("every-"))
        return "full" if (layer + 1) % every == 0 else "none"
    return setting


def linear_repeats(setting: Recompute, layers: int) -> int:
    """How many of ``layers`` layers rerun everything except the attention core.

    >>> linear_repeats("selective", 6), linear_repeats("every-2", 6), linear_repeats("none", 6)
    (6, 3, 0)
    """
    kinds = [layer_recompute(setting, layer) for layer in range(layers)]
    return kinds.count("full") + kinds.count("selective")


def attention_repeats(setting: Recompute, layers: int) -> int:
    """How many of ``layers`` layers rerun the attention core and its messages.

    >>> attention_repeats("selective", 6), attention_repeats("every-2", 6)
    (0, 3)
    """
    kinds = [layer_recompute(setting, layer) for layer in range(layers)]
    return kinds.count("full") + kinds.count("attention")
