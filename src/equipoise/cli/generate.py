"""``equipoise generate``: a trained model continues a text."""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.cli.console import make_progress
from equipoise.cli.counts import require_counts

if TYPE_CHECKING:
    from equipoise.serve.generate import Generated, Generator
    from equipoise.serve.sample import Sampling

HELP = "continue a text, or chat, with a run, a checkpoint or a Hugging Face folder"

EXAMPLES = """\
examples:
  equipoise generate runs/run "def "                       the likeliest continuation
  equipoise generate runs/run "def " --tokens 20
  equipoise generate smollm2 --chat "What is a prime?"     an answer, by the model's chat template
  equipoise generate smollm2 --chat                        a conversation; Ctrl-D ends it
  equipoise generate smollm2 "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 7
  equipoise generate runs/run/checkpoint/step-000250 < prompt.txt

Text streams as it comes, after the prompt; --quiet prints the new text alone. It ends at the
model's end tokens or after --tokens. Without --temperature, --top-k and --top-p the likeliest
token is taken; the same seed draws the same text. Without TEXT the prompt is read from stdin,
without its last line break, or asked for at a terminal.

--json prints {"text", "tokens", "prompt_tokens", "stopped", "ids", "prompt_ids", "seconds",
"from", "step"}: "text" is the new text, "tokens" its number of tokens, "stopped" is "end" (an end
token came) or "length".
"""

_TOKENS, _CHAT_TOKENS = 256, 1024
_MOST_TOKENS = 1 << 20
_LONG_TOKENS = 4096
"""A longer prompt takes a while to read, which is shown."""
_ALONE_PARAMS = 1_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="MODEL",
        help="a run's folder, a checkpoint, a Hugging Face folder, or a .gguf file",
    )
    parser.add_argument(
        "text", nargs="?", metavar="TEXT", help="what to continue (default: stdin, or asked for)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"most new tokens (default: {_TOKENS}; with --chat {_CHAT_TOKENS:,})",
    )
    parser.add_argument(
        "--chat", action="store_true", help="TEXT is a message, and the model answers it"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system's message")
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
    """Load the model, then continue or answer one text, or each that is asked for."""
    if args.system is not None and not args.chat:
        raise SpecError("--system needs --chat. Give both or neither.")
    text, sampling = _text(args), _sampling(args)
    args.tokens = (_CHAT_TOKENS if args.chat else _TOKENS) if args.tokens is None else args.tokens
    if args.tokens < 1:
        raise SpecError(f"--tokens must be at least 1; it is {args.tokens}.")
    require_counts(args, {"tokens": _MOST_TOKENS})
    from equipoise.serve.generate import Generator
    from equipoise.serve.source import open_model

    trained = open_model(args.source)
    _settle(trained.params)
    generator = Generator(trained)
    if not (args.quiet or args.json):
        sys.stderr.writelines(f"{remark}\n" for remark in trained.remarks)
    talk: list[dict[str, str]] = []
    if args.system is not None:
        talk.append({"role": "system", "content": args.system})
    if text is not None:
        _answer(generator, text, talk, sampling, args)
        return 0
    if args.chat:
        generator.encode([*talk, {"role": "user", "content": ""}])  # refused before it is asked
    while True:
        try:
            text = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return 0
        if text:
            _answer(generator, text, talk, sampling, args)


def _settle(params: int) -> None:
    """Compute small models on one core.

    A token of theirs takes milliseconds in hundreds of products. Threads that meet in each of
    them wait for the slowest: measured 13 times slower for 135M weights beside busy programs.
    """
    import torch

    if params < _ALONE_PARAMS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _text(args: argparse.Namespace) -> str | None:
    """The text to continue or answer; None if a person at a terminal is to be asked."""
    if args.text is not None:
        return str(args.text)
    if sys.stdin is None or sys.stdin.isatty():
        if args.json:
            raise SpecError("--json answers one text. Give it after the model, or on stdin.")
        return None
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"The prompt on stdin is not {error.encoding.upper()} text: byte "
            f"0x{error.object[error.start]:02x}. Convert it."
        ) from None


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
    generator: "Generator",
    text: str,
    talk: list[dict[str, str]],
    sampling: "Sampling",
    args: argparse.Namespace,
) -> None:
    """Continue a text or answer a message, and show what comes as it comes.

    A message and its answer are added to ``talk``.
    """
    from equipoise.serve.generate import Generated
    from equipoise.serve.prompt import Prompt

    began = time.perf_counter()
    prompt: Prompt = text
    if args.chat:
        talk.append({"role": "user", "content": text})
        prompt = talk
    silent = args.quiet or args.json
    ids = generator.encode(prompt)
    if len(ids) > _MOST_TOKENS:
        raise SpecError(
            f"The prompt has {len(ids):,} tokens, and at most {_MOST_TOKENS:,} are read. Shorten "
            "it."
        )
    if not silent:
        _warn_of_length(generator, len(ids) + args.tokens)
    with _reading(len(ids), is_quiet=silent) as advance:
        parts = generator.stream_ids(ids, tokens=args.tokens, sampling=sampling, advance=advance)
        first = next(parts)
    if not (silent or args.chat):
        sys.stdout.write(text)
    for part in itertools.chain((first,), parts):
        if isinstance(part, Generated):
            _finish(generator, part, time.perf_counter() - began, args)
            talk.append({"role": "assistant", "content": part.text})
        elif not args.json:
            sys.stdout.write(part)
            sys.stdout.flush()


@contextmanager
def _reading(tokens: int, *, is_quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """Show how much of a long prompt is read, by a function that takes how many more are."""
    if tokens <= _LONG_TOKENS:
        yield None
        return
    progress = make_progress(is_quiet)
    progress.start(f"read {tokens:,} tokens", tokens)
    try:
        yield progress.advance
    finally:
        progress.finish()


def _warn_of_length(generator: "Generator", tokens: int) -> None:
    longest = generator.trained.context_tokens
    if longest is not None and tokens > longest:
        sys.stderr.write(
            f"Prompt and new tokens may reach {tokens:,} tokens, and the model was trained with "
            f"windows of {longest:,}: what comes after may make less sense.\n"
        )


def _finish(
    generator: "Generator", whole: "Generated", seconds: float, args: argparse.Namespace
) -> None:
    if not args.json:
        sys.stdout.write("\n")
        return
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
