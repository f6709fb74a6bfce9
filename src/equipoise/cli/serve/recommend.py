"""``equipoise serve`` of a recommender: a run's folder, or one that ``convert`` made."""

import argparse
import json
import sys
import time

from equipoise.base.errors import SpecError

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
    from equipoise.serve.http.server import Server, listen
    from equipoise.serve.ranking.app import RankState, make_rank_app
    from equipoise.serve.ranking.batcher import Batcher

    torch.set_num_threads(1)  # as ranks have while they train and evaluate
    listener = listen(args.host, args.port)

    def log(line: str) -> None:
        if not (args.quiet or args.json):
            sys.stderr.write(f"{line}\n")

    try:
        ranker = open_any(args.model)
        host = f"[{args.host}]" if ":" in args.host else args.host
        url = f"http://{host}:{listener.getsockname()[1]}/v1"

        def say_ready() -> None:
            seconds = time.monotonic() - began_s
            facts = {
                "url": url,
                "model": ranker.name,
                "from": str(args.model),
                "step": ranker.step,
                "columns": list(ranker.columns),
                "tables": len(ranker.scorer.tables),
                "weight_bytes": ranker.scorer.held_bytes,
                "form": ranker.form,
                "seconds": seconds,
            }
            words = (
                f"Ranking with {ranker.name} on {url}/rank (step {ranker.step:,}, "
                f"{len(ranker.scorer.tables)} tables, {ranker.scorer.held_bytes:,} bytes of "
                f"{ranker.form}; ready in {seconds:.1f} s). Ctrl-C stops."
            )
            sys.stdout.write((json.dumps(facts, indent=1) if args.json else words) + "\n")
            sys.stdout.flush()

        with Batcher(ranker) as batcher:
            state = RankState(batcher, log=log)
            Server(make_rank_app(state), state, say_ready).run(sockets=[listener])
            log(state.metrics.words())
    finally:
        listener.close()
    return 0
