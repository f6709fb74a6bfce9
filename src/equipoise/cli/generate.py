"""``equipoise generate``: a trained model continues a text."""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError

if TYPE_CHECKING:
    from equipoise.serve.generate import Generated, Generator
    from equipoise.serve.sample import Sampling

HELP = "continue a text with a run, a checkpoint or a Hugging Face folder"

EXAMPLES = """\
examples:
  equipoise generate runs/run "def "                       the likeliest continuation
  equipoise generate runs/run "def " --tokens 20
  equipoise generate smollm2 "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 7
  equipoise generate runs/run/checkpoint/step-000250 < prompt.txt
  equipoise generate smollm2                               asks for texts, one after another

Text streams as it comes, after the prompt; --quiet prints the continuation alone. It ends at the
model's end tokens or after --tokens. Without --temperature, --top-k and --top-p the likeliest
token is taken; the same seed draws the same text.

--json prints {"text", "tokens", "prompt_tokens", "stopped", "ids", "prompt_ids", "seconds",
"from", "step"}: "text" is the continuation, "tokens" its number of tokens, "stopped" is "end" (an
end token came) or "length".
"""

_TOKENS = 256
_ALONE_PARAMS = 1_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="MODEL",
        help="a run's folder, a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument(
        "text", nargs="?", metavar="TEXT", help="what to continue (default: stdin, or asked for)"
    )
    parser.add_argument(
        "--tokens", type=int, default=_TOKENS, metavar="N", help="most new tokens (default: 256)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="draw tokens, from logits divided by T (default: 1 beside --top-k or --top-p, else "
        "0, the likeliest token)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the likeliest tokens that make up P of the probability (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Load the model, then continue one text, or each that is asked for."""
    texts = _texts(args)
    from equipoise.serve.generate import Generator
    from equipoise.serve.source import open_model

    sampling = _sampling(args)
    if args.tokens < 1:
        raise SpecError(f"--tokens must be at least 1; it is {args.tokens}.")
    trained = open_model(args.source)
    _settle(trained.model.params)
    generator = Generator(trained)
    silent = args.quiet or args.json
    if not silent:
        sys.stderr.writelines(f"{remark}\n" for remark in generator.trained.remarks)
    if texts is not None:
        _answer(generator, texts, sampling, args)
        return 0
    while True:
        try:
            text = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return 0
        if text:
            _answer(generator, text, sampling, args)


def _settle(params: int) -> None:
    """Compute small models on one core.

    A token of theirs takes milliseconds in hundreds of products. Threads that meet in each of
    them wait for the slowest: measured 13 times slower for 135M weights beside busy programs.
    """
    import torch

    if params < _ALONE_PARAMS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _texts(args: argparse.Namespace) -> str | None:
    """The text to continue; None if a person at a terminal is to be asked."""
    if args.text is not None:
        return str(args.text)
    if sys.stdin is None or sys.stdin.isatty():
        if args.json:
            raise SpecError("--json answers one text. Give it after the model, or on stdin.")
        return None
    return sys.stdin.read().removesuffix("\n")


def _sampling(args: argparse.Namespace) -> "Sampling":
    from equipoise.serve.sample import Sampling

    draws = args.top_k is not None or args.top_p is not None
    temperature = float(draws) if args.temperature is None else args.temperature
    if draws and not temperature:
        raise SpecError(
            "--top-k and --top-p limit what is drawn, and --temperature 0 draws nothing. Raise "
            "the temperature, or leave them out."
        )
    return Sampling(
        temperature,
        top_k=args.top_k or 0,
        top_p=1.0 if args.top_p is None else args.top_p,
        seed=args.seed,
    )


def _answer(
    generator: "Generator", text: str, sampling: "Sampling", args: argparse.Namespace
) -> None:
    """Continue one text, and show it as it comes."""
    from equipoise.serve.generate import Generated

    began = time.perf_counter()
    silent = args.quiet or args.json
    if not silent:
        sys.stdout.write(text)
    for part in generator.stream(text, tokens=args.tokens, sampling=sampling):
        if isinstance(part, Generated):
            _finish(generator, part, time.perf_counter() - began, args)
        elif not args.json:
            sys.stdout.write(part)
            sys.stdout.flush()


def _finish(
    generator: "Generator", whole: "Generated", seconds: float, args: argparse.Namespace
) -> None:
    if args.json:
        answer = {
            "text": whole.text,
            "tokens": len(whole.ids),
            "prompt_tokens": len(whole.prompt_ids),
            "stopped": whole.stopped,
            "ids": whole.ids,
            "prompt_ids": whole.prompt_ids,
            "seconds": seconds,
            "from": str(generator.trained.origin),
            "step": generator.trained.step,
        }
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return
    sys.stdout.write("\n")
