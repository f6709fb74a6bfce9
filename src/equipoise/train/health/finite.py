"""The message for a step whose loss or gradient is not a number: which documents, which layer."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from equipoise.base.errors import NonFiniteError
from equipoise.comm.group import Ranks
from equipoise.data.cache.store import TokenStore
from equipoise.fault.blame import first_bad_layer, last_bad_gradient, tell_documents, tell_layer
from equipoise.observe.journal import EventSink
from equipoise.spec.pack import MicroBatch


def blame_step(
    what: str,
    losses: Sequence[tuple[MicroBatch, float]],
    *,
    decoder: nn.Module,
    run_again: Callable[[], object],
    store: TokenStore,
    ranks: Ranks,
    journal: EventSink,
    step: int,
    last_good: Path | None,
) -> NonFiniteError:
    """Journal and say where numbers went bad; every rank calls it.

    Args:
        what: What is not a number: ``loss of step 7``.
        losses: This rank's micro-batches, and the loss of each.
        decoder: With the gradients of the step.
        run_again: Runs the step's forward pass once more.
        store: Names documents.
        ranks: All of them.
        journal: This rank's.
        step: The step.
        last_good: The checkpoint to name.
    """
    bad = [batch for batch, loss in losses if not math.isfinite(loss)]
    numbers = {int(number) for batch in bad for number in batch.pieces[:, 0]}
    mine = sorted({number % store.documents for number in numbers})
    documents = sorted(set(itertools.chain(*ranks.gather_objects(mine))))
    where, fix = tell_documents(documents, store.name)
    bad_gradient = last_bad_gradient(decoder)  # a forward pass puts whole weights in its place
    layers = ranks.gather_objects((first_bad_layer(decoder, run_again), bad_gradient))
    layer = tell_layer(*zip(*layers, strict=True))
    kept = f"the last good checkpoint is {last_good}" if last_good else "no checkpoint yet"
    journal.write(
        "fault",
        "nan-loss",
        step=step,
        documents=documents,
        what=what.removesuffix(f" of step {step}"),
        message=layer.strip(),
    )
    return NonFiniteError(
        f"The {what} is not a number{where}. No weight was changed; {kept}. {layer}{fix}"
    )
