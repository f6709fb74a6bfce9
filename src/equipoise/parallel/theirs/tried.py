"""Refuse a folder whose model would not be exact, before a corpus is read or a rank starts.

What it decides
    A small model of the same architecture (``shrink``) is compared over two ranks, played in this
    process, with its documents one by one: loss, logits and every gradient. The refusal shows what
    was compared. ``equipoise check`` proves the same model over real ranks and every layout.

Kept true (tests/oracle/test_engine_models.py)
    Architectures that equal one rank pass; one that reads a neighbour's token is refused.
"""

from pathlib import Path

from transformers import PreTrainedModel

from equipoise.base.errors import CheckError, EquipoiseError, LayoutError, ModelError
from equipoise.parallel.context.transformers import register_attention
from equipoise.parallel.context.transformers_trial import (
    TriedPack,
    compare_over_ranks,
    show_compared,
)
from equipoise.parallel.theirs.build import build_random, read_theirs_config, require_trainable
from equipoise.parallel.theirs.layers import find_layers
from equipoise.parallel.theirs.shrink import shrink_config

TOLERANCE = 1e-3
"""Largest error in fp32 of a loss, of the largest logit, or of a gradient's norm."""

_DOC_TOKENS = (61, 1, 90)


def require_exact_folder(folder: Path, context_tokens: int) -> None:
    """Try out a small model of a folder's architecture.

    Args:
        folder: Has a config.json.
        context_tokens: Longest document of the run [tokens].

    Raises:
        ModelError: transformers cannot build the model, or it would not be exact; with a table
            where it was compared.
    """
    config = read_theirs_config(folder)
    if getattr(config, "quantization_config", None):
        return  # refused with the folder's weights
    theirs = build_random(shrink_config(config), seed=0)
    require_trainable(theirs, context_tokens)
    find_layers(theirs)
    try_out(theirs)


def try_out(theirs: PreTrainedModel) -> None:
    """Compare a model over two ranks with its documents one by one.

    Raises:
        ModelError: it differs; with a table.
    """
    name = type(theirs).__name__
    register_attention(theirs)
    try:
        rows = compare_over_ranks(theirs, [TriedPack(_DOC_TOKENS)], short_windows=True)
    except EquipoiseError as error:
        if isinstance(error, ModelError):
            raise
        reason = str(error).split(". ")[0] if isinstance(error, CheckError | LayoutError) else error
        raise ModelError(f"{name} would not be exact over ranks: {reason}.") from error
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
        raise ModelError(
            f"{name} could not be tried out over ranks; that ended in {type(error).__name__}: "
            f"{reason}."
        ) from error
    if not all(row.worst <= TOLERANCE for row in rows):
        raise ModelError(
            f"{name} is not exact over ranks: some layer reads other tokens, goes by where a token "
            f"lies, or has a loss of its own.\n{show_compared(rows, TOLERANCE)}\nTrain another "
            f"model, or this one with its own trainer."
        )
