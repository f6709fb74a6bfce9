"""What each layer keeps for its backward, by the run's setting ``train.recompute``.

What it decides
    ``D`` is the model's width, ``q`` and ``k`` the widths of all query and of all key heads, ``F``
    the feed-forward's; numbers are what a dense layer keeps of a token, norms' scales left out:

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

    The attention core is the quadratic part. Its scores are never kept (flash attention makes
    them again in every backward), which was most of what Korthikanti's selective recomputation
    saved; ``attention`` is what is left of it, the core's output and its log-sum-exps.
    ``selective`` is the other way around: the core's results are kept, and its work, and with
    context parallelism its messages, are never repeated, however long the documents are.

Kept true (tests/unit/nn/test_decoder.py, tests/unit/cost/memory/test_layer.py)
    Loss and gradients are those of ``none``, bitwise; the core runs as often, and a layer keeps as
    much, as is said here.

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
    """How many of so many layers run all but their attention core again.

    >>> linear_repeats("selective", 6), linear_repeats("every-2", 6), linear_repeats("none", 6)
    (6, 3, 0)
    """
    kinds = [layer_recompute(setting, layer) for layer in range(layers)]
    return kinds.count("full") + kinds.count("selective")


def attention_repeats(setting: Recompute, layers: int) -> int:
    """How many of so many layers run their attention core again, and send its messages.

    >>> attention_repeats("selective", 6), attention_repeats("every-2", 6)
    (0, 3)
    """
    kinds = [layer_recompute(setting, layer) for layer in range(layers)]
    return kinds.count("full") + kinds.count("attention")
