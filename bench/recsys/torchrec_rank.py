"""One rank of DLRM under torchrec; runs in an environment of its own, and imports no bench.

``python torchrec_rank.py FILE RANK PORT``: the file has samples, first weights and the plan;
seconds of steps and the last weights come back beside it. Batches are cut from the samples by each
step, as ours are, unless ``ready`` is set.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec_shards import fill, join

from equipoise.recsys.models.dlrm import DLRM
from equipoise.spec.tables.table import TableSpec


class Model(nn.Module):
    """Tables of torchrec under the dense part that ours has."""

    def __init__(self, given: dict, facts: dict) -> None:
        super().__init__()
        self.keys = facts["keys"]
        configs = [
            EmbeddingBagConfig(
                num_embeddings=rows,
                embedding_dim=facts["width"],
                name=key,
                feature_names=[key],
                pooling=PoolingType.SUM,
            )
            for key, rows in zip(self.keys, facts["rows"], strict=True)
        ]
        self.tables = EmbeddingBagCollection(configs, device=torch.device("cpu"))
        with torch.no_grad():
            for key in self.keys:
                weight = torch.from_numpy(given[f"table {key}"])
                self.tables.embedding_bags[key].weight.copy_(weight)
        specs = [
            TableSpec(k, r, facts["width"]) for k, r in zip(self.keys, facts["rows"], strict=True)
        ]
        self.dense = DLRM(specs, facts["numbers"], bottom=facts["bottom"], top=facts["top"], seed=0)
        self.dense.load_state_dict(
            {
                key.removeprefix("dense "): torch.from_numpy(value)
                for key, value in given.items()
                if key.startswith("dense ")
            }
        )

    def forward(self, numbers: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Logits; features by key, since their order follows the plan."""
        pooled = self.tables(ids)
        return self.dense(torch.cat([pooled[key] for key in self.keys], dim=1), numbers)


def make_batch(given: dict, facts: dict, index: np.ndarray):
    """Numbers, ids and labels of some samples, as ``Samples.batch`` cuts them."""
    lengths, values = [], []
    for key in facts["keys"]:
        offsets, ids = given[f"offsets {key}"], given[f"ids {key}"]
        begin = offsets[index]
        count = offsets[index + 1] - begin
        ends = np.cumsum(count)
        within = np.arange(int(count.sum())) - np.repeat(ends - count, count)
        lengths.append(count.astype(np.int32))
        values.append(ids[np.repeat(begin, count) + within])
    jagged = KeyedJaggedTensor(
        keys=facts["keys"],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )
    return (
        torch.from_numpy(given["numbers"][index]),
        jagged,
        torch.from_numpy(given["labels"][index]),
    )


def main() -> None:
    file, rank, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    join(rank, port)
    given = dict(np.load(file))
    facts = json.loads(str(given["facts"]))
    model = Model(given, facts)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": facts["lr"],
            "eps": 1e-8,
        }
    )
    owner = dict(zip(facts["keys"], facts["owner"], strict=True))
    # Unless a plan names the fused kernel, torchrec takes a dense one, which drops ``fused_params``
    # with a warning and never updates the tables.
    plan = construct_module_sharding_plan(
        model.tables,
        {key: table_wise(rank=owner[key], compute_kernel="fused") for key in facts["keys"]},
        sharder=sharder,
        world_size=2,
        local_size=2,
        device_type="cpu",
    )
    parallel = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
    )
    fill(parallel, {key: torch.from_numpy(given[f"table {key}"]) for key in facts["keys"]})
    dense = [p for name, p in parallel.named_parameters() if "dense" in name]
    optimizer = torch.optim.Adam(dense, lr=facts["dense_lr"])
    batch, steps, warm = facts["batch"], facts["steps"], facts["warm"]
    order = given["order"]
    shares = [
        order[at * batch : (at + 1) * batch][rank * batch // 2 : (rank + 1) * batch // 2]
        for at in range(steps)
    ]
    ready = [make_batch(given, facts, share) for share in shares] if facts["ready"] else None
    losses, began = [], 0.0
    for at, share in enumerate(shares):
        if at == warm:
            dist.barrier()
            began = time.perf_counter()
        numbers, ids, labels = make_batch(given, facts, share) if ready is None else ready[at]
        logits = parallel(numbers, ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)  # ours says the loss of the global batch, too
        losses.append(float(total) / 2)
    dist.barrier()
    took = time.perf_counter() - began
    weights = {
        name.split(".")[-2]: tensor
        for name, tensor in parallel.state_dict().items()
        if "embedding_bags" in name
    }
    out = {}
    for key, tensor in weights.items():
        if owner[key] == rank:
            shards = tensor.local_shards() if hasattr(tensor, "local_shards") else None
            local = tensor if shards is None else shards[0].tensor
            out[f"table {key}"] = local.detach().numpy()
    if rank == 0:
        out |= {
            f"dense {name.split('dense.')[-1].removeprefix('module.')}": each.detach().numpy()
            for name, each in parallel.named_parameters()
            if "dense" in name
        }
    out |= {"losses": np.array(losses), "seconds": np.array(took)}
    np.savez(file.with_name(f"torchrec-{rank}.npz"), **out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
