"""Functions of ranks in ``test_hf_context_agree``; their first argument is their ``Ranks``."""

from typing import Any

import torch
import torch.distributed as dist

from equipoise.base.errors import EquipoiseError
from equipoise.comm.group import Ranks
from equipoise.parallel.context.batch import shard_batch
from equipoise.parallel.context.transformers import use_context_parallelism
from support.ranks.hf_context_ranks import VOCAB, build, draw, train_with_trainer

LENGTHS = (30, 41)


def refusal(model: Any, batch: dict[str, Any]) -> str:
    """This rank's error message; empty if it reaches its gradients."""
    try:
        model(**batch).loss.backward()
    except EquipoiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def different_packs(ranks: Ranks, last: dict[str, Any]) -> str:
    """All ranks but the last have one pack; the last one's differs in part."""
    model = build("llama")
    use_context_parallelism(model)
    ids, labels = draw(LENGTHS)
    given = {"doc_tokens": LENGTHS, "labels_T": labels, "sharding": "contiguous"}
    if ranks.rank >= 1:
        ids = (ids + last.get("ids", 0)) % VOCAB
        given |= {name: value for name, value in last.items() if name != "ids"}
        if last.get("labels_T") == "none":
            given["labels_T"] = torch.full_like(labels, -100)
    return refusal(model, shard_batch(ids, **given))


def batches_in_another_order(ranks: Ranks) -> list[str]:
    """Prepared batches, agreed upon once, that a second pass takes in another order."""
    model = build("llama")
    use_context_parallelism(model)
    batches = [shard_batch(draw(LENGTHS, seed)[0], LENGTHS) for seed in (0, 1)]
    first = [refusal(model, batch) for batch in batches]
    return [*first, refusal(model, batches[ranks.rank])]


def groups_apart(ranks: Ranks) -> str:
    """Two pairs of ranks with a pack each, which is allowed."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    which = ranks.rank // 2
    model = build("llama")
    use_context_parallelism(model)
    lengths = (30, 41) if which else (9, 5, 26)
    return refusal(model, shard_batch(draw(lengths)[0], lengths, group=groups[which]))


def collectives_of_a_step(ranks: Ranks) -> tuple[int, int]:
    """How often ranks compare packs in one step, without and with recomputation."""
    counts = []
    for recompute in (False, True):
        model = build("llama")
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        use_context_parallelism(model)
        batch = shard_batch(draw(LENGTHS)[0], LENGTHS)
        with torch.profiler.profile() as profile:
            model(**batch).loss.backward()
        names = [event.name for event in profile.events()]
        counts.append(names.count("gloo:all_gather"))
    return counts[0], counts[1]


def default_loader(ranks: Ranks, folder: str) -> str:
    """Trainer's own loader, which accelerate shards over ranks, under the collator."""
    code = (
        "from transformers import Trainer\n"
        "from equipoise.parallel.context.batch import ContextCollator\n"
        "class ContextTrainer(Trainer):\n"
        "    def __init__(self, *given, **named):\n"
        "        super().__init__(*given, data_collator=ContextCollator(), **named)\n"
    )
    try:
        train_with_trainer(ranks, folder, code, True)
    except EquipoiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""
