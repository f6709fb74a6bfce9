"""What both programs of a torchrec rank begin with: two ranks joined, tables given their weights.

Runs in torchrec's environment, beside the program that imports it.
"""

import os

import torch
import torch.distributed as dist


def join(rank: int, port: str) -> None:
    """Join two gloo ranks of one host, one thread each."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)


def fill(model, whole) -> None:
    """Give sharded tables their weights: torchrec draws its own where it shards."""
    for name, value in model.state_dict().items():
        if "embedding_bags" not in name:
            continue
        weight = whole[name.split(".")[-2]]
        with torch.no_grad():
            if not hasattr(value, "local_shards"):
                value.copy_(weight)
                continue
            for shard in value.local_shards():
                begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                columns = slice(begin[1], begin[1] + size[1])
                shard.tensor.copy_(weight[begin[0] : begin[0] + size[0], columns])
