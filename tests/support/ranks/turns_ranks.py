"""Functions of ranks in ``test_turns``, over gloo and in turns."""

import torch
import torch.distributed as dist

from equipoise.comm.group import Ranks
from equipoise.comm.mail import Mail, Parcel
from equipoise.comm.mesh import Mesh
from equipoise.comm.turns import play_ranks
from equipoise.spec.layout import Layout


def drawn(rank: int, rows: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 3, dtype=torch.float64, generator=source)


def use_everything(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Every kind of collective that equipoise uses, over the world and over pairs; messages."""
    layout = Layout(dp=2, tp=2)
    peers = Mesh.join(ranks, layout).peers("tp")
    results = {}
    for name, group, at, of in (
        ("world", dist.group.WORLD, ranks.rank, ranks.world),
        ("pair", peers.group, peers.rank, peers.count),
    ):
        x = drawn(ranks.rank, 2 * of)
        total, largest = x.clone(), x.clone()
        dist.all_reduce(total, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        gathered, part = x.new_empty(of * len(x), 3), x.new_empty(2, 3)
        dist.all_gather_single(gathered, x, group=group)
        dist.reduce_scatter_single(part, x, group=group)
        sizes = [(at + to) % 3 for to in range(of)]  # the same both ways
        moved = x.new_empty(sum(sizes), 3)
        dist.all_to_all_single(moved, drawn(at, sum(sizes)), sizes, sizes, group=group)
        objects = [None] * of
        dist.all_gather_object(objects, {"rank": ranks.rank}, group=group)
        from_first = x.clone()
        dist.broadcast(from_first, group_src=0, group=group)
        dist.barrier(group=group)
        results |= {
            f"{name} sum": total,
            f"{name} max": largest,
            f"{name} gather": gathered,
            f"{name} scatter": part,
            f"{name} all-to-all": moved,
            f"{name} objects": torch.tensor([each["rank"] for each in objects]),
            f"{name} broadcast": from_first,
        }
    mail, other = Mail(peers.group), 1 - peers.rank
    sent = [drawn(10 * ranks.rank + tag, 1 + tag) for tag in (0, 1)]
    rooms = [torch.empty(1 + tag, 3, dtype=torch.float64) for tag in (0, 1)]

    def parcels(tensors: list[torch.Tensor]) -> list[Parcel]:
        flat = [each.view(-1).view(torch.uint8) for each in tensors]
        return [Parcel(other, tag, data, due=tag) for tag, data in enumerate(flat)]

    mail.post(parcels(sent)[::-1], [])
    sent[0].view(-1)  # left alone until it has been waited for
    mail.post([], parcels(rooms))
    for due in (1, 0):
        mail.wait(due)
    return results | {f"message {tag}": room for tag, room in enumerate(rooms)}


def in_turns(host: Ranks) -> list[dict[str, torch.Tensor]]:
    del host
    return play_ranks(4, use_everything)


def fail(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError("no more of it")
    ranks.barrier()


def miss(ranks: Ranks) -> None:
    """Rank 0 waits for a message, the others for rank 0."""
    if ranks.rank == 0:
        room = torch.zeros(4, dtype=torch.uint8)
        mail = Mail()
        mail.post([], [Parcel(1, 0, room, due=0)])
        mail.wait(0)
    else:
        ranks.barrier()


def play(host: Ranks, what: str) -> str:
    del host
    try:
        play_ranks(3, {"fail": fail, "miss": miss}[what])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
