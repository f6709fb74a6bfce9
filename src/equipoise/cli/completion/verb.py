"""``equipoise completion``: a script that completes verbs, flags and keys in a shell."""

import argparse
import json
import sys

HELP = "print a script with which bash, zsh or fish completes verbs, flags and keys"

EXAMPLES = """\
examples:
  source <(equipoise completion bash)          this shell; add the line to ~/.bashrc for all
  equipoise completion bash > ~/.local/share/bash-completion/completions/equipoise
  source <(equipoise completion zsh)           after compinit, in ~/.zshrc
  equipoise completion fish > ~/.config/fish/completions/equipoise.fish

All words stand in the script: a tab starts no Python. Make it again after an upgrade.
--json prints {"verbs": {verb: [flags]}, "keys": [keys of run.toml as flags]}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="whose script")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from equipoise.cli.completion.scripts import SHELLS
    from equipoise.cli.completion.words import read_words

    words = read_words()
    if args.json:
        shown = {
            "verbs": {verb.name: [flag.name for flag in verb.flags] for verb in words.verbs},
            "keys": [key.name for key in words.keys],
        }
        sys.stdout.write(json.dumps(shown) + "\n")
    else:
        sys.stdout.write(SHELLS[args.shell](words))
    return 0
