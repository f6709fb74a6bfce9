"""Check that the ranks sharing a pack were given the same one, before they attend.

Why
    If a loader gives each rank its own documents, training silently goes wrong: keys of one pack
    meet queries of another, and the shapes may well agree.

What it decides
    Ranks exchange five integers in one collective: digests of lengths, of tokens and labels, and
    of how the pack is shared, and two counts for the message. Every rank gets all of them, so all
    ranks stop, and none waits for a message.

Kept true (tests/oracle/hf/test_hf_context_agree.py)
    Ranks with different packs stop at the first layer, in the first step and in later ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from equipoise.base.digest import digest
from equipoise.base.errors import CheckError


def require_one_pack(
    doc_tokens: Sequence[int],
    contents: str,
    settings: Sequence[Any],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Compare this rank's pack with those of the other ranks of its group.

    Args:
        doc_tokens: Length of each document [tokens].
        contents: Digest of tokens and labels.
        settings: Everything else that must be equal, as plain data.
        group: The ranks that share the pack; by default all ranks.
        device: Where the group's collectives run.

    Raises:
        CheckError: names the ranks that differ from the first one, and how.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return
    names = [int(digest(x)[:15], 16) for x in (list(doc_tokens), contents, list(settings))]
    mine = torch.tensor([*names, len(doc_tokens), sum(doc_tokens)], device=device)
    rows = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(rows, mine, group=group)
    first, *others = torch.stack(rows).tolist()
    world = dist.get_process_group_ranks(group)
    differing = [at for at, row in enumerate(others, 1) if row != first]
    if not differing:
        return
    other = others[differing[0] - 1]
    if other[0] != first[0]:
        what = (
            f"rank {world[differing[0]]} has {other[4]:,} tokens in {other[3]} documents, rank "
            f"{world[0]} has {first[4]:,} in {first[3]}"
            if other[3:] != first[3:]
            else "lengths of documents differ"
        )
    else:
        what = "tokens or labels differ" if other[1] != first[1] else "strategy or sharding differ"
    listed = ", ".join(str(world[at]) for at in differing)
    subject = "Ranks" if len(differing) > 1 else "Rank"
    verb = "were" if len(differing) > 1 else "was"
    raise CheckError(
        f"{subject} {listed} {verb} given another pack than rank {world[0]}: {what}. Give all "
        f"ranks of the group the same documents in the same order; loaders that accelerate "
        f"prepares give each rank its own."
    )
