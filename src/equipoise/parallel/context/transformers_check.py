"""Whether a model of ``transformers`` is exact over ranks: tried out, in this process.

Why
    There are hundreds of architectures, and a layer that reads a token's neighbour, or counts
    tokens instead of reading their positions, is wrong over ranks and says nothing.

What it decides
    Documents are laid out as two ranks hold them, one rank after the other, so neighbours and
    indices are not those of the documents. Logits must be, all the same.

Kept true (tests/oracle/test_hf_context.py)
    Models that equal one rank over real ranks pass; one that reads neighbours does not.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from equipoise.base.errors import CheckError
from equipoise.parallel.context.attention import attend_in_one_process
from equipoise.parallel.context.batch import ContextPack
from equipoise.parallel.context.plan import plan_context, share_tokens
from equipoise.parallel.context.transformers import NAME, use_context_parallelism
from equipoise.spec.mask import Mask

_RANKS = 2
_SHARDING = "head-tail-document"


@dataclass(frozen=True, slots=True)
class _PlayedPack(ContextPack):
    """A pack whose ranks are all in this process, their tokens one after another."""

    def agree(self, layer: object, device: torch.device) -> None:
        """All ranks are this process."""

    def attend(self, q_tHE: Tensor, k_tGE: Tensor, v_tGE: Tensor, mask: Mask) -> Tensor:
        plan = plan_context(
            self.doc_tokens,
            _RANKS,
            self.strategy,
            heads=q_tHE.shape[1],
            kv_heads=k_tGE.shape[1],
            mask=mask,
            sharding=_SHARDING,
        )
        order = torch.from_numpy(np.concatenate(plan.shares.rows)).to(q_tHE.device)
        back = torch.argsort(order)
        return attend_in_one_process(q_tHE[back], k_tGE[back], v_tGE[back], plan)[order]


def check_context_parallelism(
    model: PreTrainedModel, doc_tokens: tuple[int, ...] = (23, 1, 40), *, tolerance: float = 1e-3
) -> float:
    """Compare a model over two ranks, played in this process, with its documents one by one.

    It wants no group of ranks, runs forward only, and leaves the model as
    ``use_context_parallelism`` makes it.

    Args:
        model: A causal language model that takes its attention from the registry.
        doc_tokens: Lengths of the documents that are tried [tokens], of tokens drawn at random.
        tolerance: The largest difference allowed, as a part of the largest logit; what is usual
            in fp32. Models in bf16 want about 0.05.

    Returns:
        The largest difference, as a part of the largest logit.

    Raises:
        ModelError: ``use_context_parallelism`` refuses the model.
        CheckError: the difference is larger.
    """
    use_context_parallelism(model)
    is_training = model.training
    shares = share_tokens(doc_tokens, _RANKS, _SHARDING)
    order, positions = (
        torch.from_numpy(np.concatenate(rows)).to(model.device)
        for rows in (shares.rows, shares.positions)
    )
    source = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (sum(doc_tokens),), generator=source).to(model.device)
    ids_1T = ids[order].unsqueeze(0)
    try:
        with torch.no_grad():
            model.train(False)
            logits = model(
                input_ids=ids_1T,
                position_ids=positions.unsqueeze(0),
                attention_mask=torch.ones_like(ids_1T),
                use_cache=False,
                context_pack=_PlayedPack(doc_tokens),
            ).logits[0]
            model.set_attn_implementation("eager")
            alone = [
                model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
                for tokens in ids.split(doc_tokens)
            ]
    finally:
        model.set_attn_implementation(NAME)
        model.train(is_training)
    wanted = torch.cat(alone)[order]
    error = float((logits - wanted).abs().max() / wanted.abs().max())
    if not error <= tolerance:
        raise CheckError(
            f"{type(model).__name__} over {_RANKS} ranks differs from its documents one by one by "
            f"{error:.1e} of the largest logit, and {tolerance:.1e} is allowed. Some layer reads "
            f"other tokens, or goes by where a token lies: train it without context parallelism."
        )
    return error
