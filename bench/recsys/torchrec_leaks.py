"""What a plan changes under torchrec 1.8, on two ranks: ``python torchrec_leaks.py RANK PORT``.

Runs in an environment of its own (``TORCHREC_PYTHON``) and imports no bench. Rank 0 prints JSON:
the order of features that come out, how far column-wise tables under row-wise AdaGrad are from one
process, and how far a data-parallel table moves under an optimizer applied in the backward pass.
"""

import json
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec_shards import fill, join

KEYS, ROWS, WIDTH, BATCH, STEPS = ("f0", "f1", "f2"), 40, 8, 6, 5
LR, EPS = 0.1, 1e-8


class Pooled(nn.Module):
    """Three tables of drawn weights."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                num_embeddings=ROWS, embedding_dim=WIDTH, name=key, feature_names=[key]
            )
            for key in KEYS
        ]
        self.tables = EmbeddingBagCollection(configs, device=torch.device("cpu"))
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for key in KEYS:
                weight = self.tables.embedding_bags[key].weight
                weight.copy_(torch.randn(weight.shape, generator=source))

    def forward(self, ids: KeyedJaggedTensor):
        """The keyed tensor as torchrec gives it."""
        return self.tables(ids)


def ids_of(ranks: Sequence[int], step: int) -> KeyedJaggedTensor:
    """The samples of some ranks in a step."""
    lengths, values = [], []
    for feature in range(len(KEYS)):
        for rank in ranks:
            source = torch.Generator().manual_seed(1000 * step + 10 * rank + feature)
            sizes = torch.randint(0, 4, (BATCH,), generator=source)
            lengths.append(sizes)
            values.append(torch.randint(0, ROWS, (int(sizes.sum()),), generator=source))
    return KeyedJaggedTensor(
        keys=list(KEYS), values=torch.cat(values), lengths=torch.cat(lengths).int()
    )


def loss_of(pooled, count: int) -> torch.Tensor:
    """A mean of squares over samples, so that gradients depend on weights."""
    return sum((pooled[key] - 1).square().sum() for key in KEYS) / count


def train_alone():
    """Steps of one process under row-wise AdaGrad as it is defined; weights, how far they moved."""
    model = Pooled()
    own = {key: model.tables.embedding_bags[key].weight for key in KEYS}
    first = {key: weight.detach().clone() for key, weight in own.items()}
    sums = {key: torch.zeros(ROWS) for key in KEYS}
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model(ids_of((0, 1), step)), 2 * BATCH).backward()
        with torch.no_grad():
            for key, weight in own.items():
                sums[key] += weight.grad.square().mean(dim=1)
                weight -= LR * weight.grad / (sums[key].sqrt() + EPS)[:, None]
    moved = max(float((own[key] - first[key]).abs().max()) for key in KEYS)
    return {key: weight.detach() for key, weight in own.items()}, moved


def train(plans):
    """Steps under row-wise AdaGrad in the backward pass; the order that came out, and weights."""
    model = Pooled()
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": LR, "eps": EPS})
    first = {key: model.tables.embedding_bags[key].weight.detach().clone() for key in KEYS}
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.tables, plans, sharder=sharder, world_size=2, local_size=2, device_type="cpu"
    )
    model = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )
    fill(model, first)
    order = list(KEYS)
    for step in range(STEPS):
        pooled = model(ids_of((dist.get_rank(),), step))
        order = list(pooled.keys())
        loss_of(pooled, BATCH).backward()
    held = {name.split(".")[-2]: value for name, value in model.state_dict().items()}
    is_sharded = any(hasattr(value, "local_shards") for value in held.values())
    weights = {}
    for key in KEYS:  # all ranks in one order; a rank may lack a table
        value, whole = held.get(key), torch.zeros(ROWS, WIDTH)
        for shard in value.local_shards() if hasattr(value, "local_shards") else ():
            begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            columns = slice(begin[1], begin[1] + size[1])
            whole[begin[0] : begin[0] + size[0], columns] = shard.tensor
        if is_sharded:
            dist.all_reduce(whole)
        weights[key] = whole if is_sharded else value.detach()
    moved = max(float((weights[key] - first[key]).abs().max()) for key in KEYS)
    return order, weights, moved


def main() -> None:
    rank, port = int(sys.argv[1]), sys.argv[2]
    join(rank, port)
    alone, moved_alone = train_alone()

    def off(plans) -> dict:
        order, weights, moved = train(plans)
        worst = max(float((weights[key] - alone[key]).abs().max()) for key in KEYS)
        return {"order": order, "off": worst, "moved": moved}

    owners = {"f0": 0, "f1": 1, "f2": 0}
    said = {
        "alone": {"order": list(KEYS), "moved": moved_alone},
        "table": off({key: table_wise(rank=owners[key]) for key in KEYS}),
        "row": off({key: row_wise() for key in KEYS}),
        "column": off({key: column_wise(ranks=[0, 1]) for key in KEYS}),
        "data": off({key: data_parallel() for key in KEYS}),
    }
    if rank == 0:
        sys.stdout.write(json.dumps(said) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
