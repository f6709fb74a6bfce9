"""``equipoise serve`` of a recommender: a run's folder, or one that ``convert`` made."""

import argparse
import time

from equipoise.base.errors import SpecError
from equipoise.base.shown import counted
from equipoise.cli.serve.front import open_front

_NOT_READ = ("tenants", "dtype", "device", "kv_tokens", "invariant")
_DEFAULTS = {"policy": "uwfq", "context": 1}
_FLAGS = {"context": "--layout.context", "kv_tokens": "--kv-tokens"}


def require(args: argparse.Namespace, *, is_loopback: bool) -> None:
    """Refuse flags that are about texts, and an address that strangers reach.

    Raises:
        SpecError: names the flag.
    """
    given = [name for name in _NOT_READ if getattr(args, name)]
    given += [name for name, default in _DEFAULTS.items() if getattr(args, name) != default]
    if given:
        flag = _FLAGS.get(given[0], f"--{given[0]}")
        raise SpecError(f"{flag} is not for a recommender. Leave it out.")
    if not is_loopback:
        raise SpecError(
            f"--host {args.host} opens the server to other machines, and a recommender has no "
            "keys. Serve on 127.0.0.1, behind a proxy that knows its users."
        )


def serve(args: argparse.Namespace) -> int:
    """Serve until a signal; then say how fast answers were."""
    began_s = time.monotonic()
    import torch
    import uvicorn  # noqa: F401 - a missing extra is said before a model is read

    from equipoise.recsys.lowbit.artefact import open_any
    from equipoise.serve.http.server import Server
    from equipoise.serve.ranking.app import RankState, make_rank_app
    from equipoise.serve.ranking.batcher import Batcher

    torch.set_num_threads(1)  # as ranks have while they train and evaluate
    with open_front(args, began_s) as front:
        ranker = open_any(args.model)
        tables, held_bytes = len(ranker.scorer.tables), ranker.scorer.held_bytes
        facts = {
            "url": front.url,
            "model": ranker.name,
            "from": str(args.model),
            "step": ranker.step,
            "columns": list(ranker.columns),
            "tables": tables,
            "weight_bytes": held_bytes,
            "form": ranker.form,
        }
        words = (
            f"Ranking with {ranker.name} on {front.url}/rank (step {ranker.step:,}, "
            f"{counted(tables, 'table')}, {held_bytes:,} bytes of {ranker.form}"
        )
        with Batcher(ranker) as batcher:
            state = RankState(batcher, log=front.log)
            server = Server(make_rank_app(state), state, lambda: front.say_ready(facts, words))
            server.run(sockets=[front.listener])
            front.log(state.metrics.words())
    return 0
