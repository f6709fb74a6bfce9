"""Check in this process whether a model of ``transformers`` is exact over ranks.

Kept true (tests/oracle/hf/test_hf_context.py, tests/oracle/hf/test_hf_rope.py)
    Models that equal one rank over real ranks pass; one that reads neighbours, one whose
    positions are counted on each rank, and one whose gradient is cut do not.
"""

from transformers import PreTrainedModel

from equipoise.parallel.context.transformers import use_context_parallelism
from equipoise.parallel.context.transformers_trial import packs_to_try, try_over_ranks


def check_context_parallelism(
    model: PreTrainedModel, doc_tokens: tuple[int, ...] = (23, 1, 40), *, tolerance: float = 1e-3
) -> float:
    """Compare a model over two ranks, played in this process, with the model on one rank.

    Logits and the gradients of all weights are compared: for documents of the lengths given, and
    for short documents whose positions cross each length at which RoPE may switch
    (``original_max_position_embeddings``, ``max_position_embeddings``). For the comparison sliding
    windows are made shorter than the documents. Attention in chunks is compared within a chunk,
    since longer documents are refused. It needs no process group, leaves gradients untouched, and
    leaves the model as ``use_context_parallelism`` makes it.

    Args:
        model: A causal language model that takes its attention from the registry.
        doc_tokens: Lengths of the documents to try [tokens]; their tokens are random.
        tolerance: The largest difference allowed, relative to the largest logit or to the norm
            of a weight's gradient. The default suits fp32; models in bf16 need about 0.1.

    Returns:
        The largest relative difference.

    Raises:
        ModelError: ``use_context_parallelism`` refuses the model.
        CheckError: the difference is larger.
    """
    use_context_parallelism(model)
    packs = packs_to_try(model.config.get_text_config(), doc_tokens)
    return try_over_ranks(model, packs, tolerance, short_windows=True)
