"""``equipoise drill``: rehearse the faults of a run before they come."""

import argparse

from equipoise.cli.drill import bit_flips, faults, runbook

HELP = "rehearse faults on a run: what notices them, how it goes on, and what is lost"

EXAMPLES = """\
examples:
  equipoise drill                            every fault, on the default run
  equipoise drill run.toml --only kill
  equipoise drill run.toml --only kill --repeat 100
  equipoise drill run.toml --only poisson --minutes 30
                                             goodput under random faults, beside its forecast
  equipoise drill run.toml --layout.dp 4 --json
  equipoise drill run.toml --bit-flips       flip bits of the trained model instead
  equipoise drill runs/run --bit-flips --flips 100 --json
  equipoise drill --runbook list             guides that find out what is wrong with a run
  equipoise drill --runbook slow-rank runs/run

The run is rehearsed in a temporary folder with its own model, layout, packing and [fault], and with
fewer and smaller steps; what was made smaller is printed. The faults are real: signals, limits and
bits, injected from within a rank at marked and at random points. Each proves that it fired, and is
judged by what the run said and by its final weights, beside those of a run without faults.

faults:
  kill          SIGKILL to a rank, at marked and random points of a step
  kill-ready    SIGKILL to a rank once others are ready to take its place
  shrink        SIGKILL to a rank at one step of three starts, until fewer go on
  kill-saving   SIGKILL to a rank at marked and random points of a save
  torn          a file of the newest checkpoint is cut, zeroed, swapped
  full-disk     no file of a rank may grow (RLIMIT_FSIZE)
  read-only     the folder of checkpoints is read-only
  hang          SIGSTOP to a rank, for good
  pause         SIGSTOP for 5 s, which must not end the run
  slow          a busy loop in every forward pass of a rank
  slow-link     what a rank sends is paced by the kernel to a few MB/s
  mismatch      a rank calls a collective that no other calls
  flip-weight   a bit of a weight flips on one rank
  flip-moment   a bit of a moment flips on one rank
  rotten        a bit of a checkpoint flips on the disk
  nan-loss      the output of a layer becomes NaN, and the loss
  nan-gradient  a gradient becomes NaN, the loss is not
  documents     bits of the tokens flip
  memory        a rank can allocate no more (RLIMIT_AS)
  terminate     SIGTERM to the command
  skew          the same folder with another seed
  version       the newest checkpoint is of a newer version
  dtype         a tensor of a checkpoint has another dtype
  desync        one rank plans other documents
  second-gang   the same command beside a running one
  older-gang    ranks wake up in a folder that others took
  poisson       kills and hangs at random moments, for --minutes

A runbook asks a run's journal, or a server's metrics; its commands that only look are run, those
that change something are proposed, and run with --act. --json prints {"guide", "state": concluded,
unknown or failed, "conclusions", "steps": [{"name", "state", "outcome", "evidence", "action"}]}.

Exit code 6: a fault was not named, or not recovered from; or a command of a runbook failed.
"""

_MODES = (runbook, bit_flips, faults)
"""What can be asked for; the last one answers where no other is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    for mode in reversed(_MODES):
        mode.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Rehearse what is asked for."""
    mode = next(mode for mode in _MODES if mode.is_asked(args))
    code: int = mode.run(args)
    return code
