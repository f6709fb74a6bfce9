"""A run's model with its experts clustered, and the table by which tokens lie with them.

Why
    Which experts a token chooses depends much on the token: known before any layer has run, that
    tells where the token should lie, once experts that the same tokens choose are on one rank.

What it decides
    Documents of the run's own corpus go through the model, forward only, and its routers' choices
    are counted; ``balance.expert`` clusters them. The experts of each layer are then renumbered so
    that those of a rank are consecutive: rows of the router and of every expert's weights change
    places together, and the model computes what it did before.

    How many rows stay on their rank is measured on the run's held-out documents. Those that the run
    also trained are left out, and without any other nothing is written.

Kept true (tests/unit/serve/test_routes.py)
    The renumbered model has the logits of the run's; rates are of held-out documents alone.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equipoise.balance.expert.cluster import cluster_experts, renumbering
from equipoise.balance.expert.routes import (
    NO_TOKEN,
    ROUTES,
    ChosenRoutes,
    LocalRates,
    fit_table,
    measure_rates,
)
from equipoise.base.arrays import Ints
from equipoise.base.errors import DataError, ModelError, SpecError
from equipoise.data.cache.store import TokenStore, open_store
from equipoise.data.held_out import cut_documents, draw_documents, find_trained
from equipoise.data.progress import Progress
from equipoise.data.text.tokenizer import load_tokenizer
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.files import ModelFiles
from equipoise.nn.moe.layer import Router
from equipoise.nn.moe.route import ExpertRows, chosen_experts
from equipoise.serve.generate import build_decoder
from equipoise.serve.source import TrainedModel
from equipoise.spec.model.experts import split_experts
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import Pieces
from equipoise.spec.run.resolved import read_resolved

_FITTED_TOKENS, _HELD_TOKENS = 1 << 18, 1 << 16
"""Tokens of whole documents that are counted, and that rates are measured on, at most."""

_BATCH_TOKENS = 4096
"""Pieces that go through the model at once have together, unless one is longer."""

_ROUTER, _EXPERTS = "feed_forward.router.weight", ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Clustered:
    """A model whose experts are clustered, and what that is worth."""

    trained: TrainedModel
    """With its experts renumbered, and the table among its files."""
    ranks: int
    fitted_tokens: int
    held_tokens: int
    left_out: int
    """Held-out documents that the run also trained."""
    rates: LocalRates
    """On the held-out tokens."""


def cluster_model(
    trained: TrainedModel,
    ranks: int,
    *,
    progress: Progress,
    fitted_tokens: int = _FITTED_TOKENS,
    held_tokens: int = _HELD_TOKENS,
) -> Clustered:
    """Cluster a run's experts for the ranks of another.

    Args:
        trained: The newest checkpoint of a run, or any.
        ranks: That will share the experts and all other weights.
        progress: Shows the tokens read.
        fitted_tokens: Of the corpus, at most.
        held_tokens: Of the held-out documents, at most.

    Raises:
        ModelError: the model has no experts, or not of our own decoder; or no folder can hold it.
        LayoutError: a rank would have no expert.
        SpecError: the run names no held-out documents.
        DataError: all of them were trained, or a token cache is damaged.
    """
    model = trained.model
    if trained.theirs is not None or not model.experts or model.identity_experts:
        what = "experts without weights" if model.identity_experts else "no experts"
        what = "modules of transformers" if trained.theirs is not None else what
        raise ModelError(
            f"{trained.origin} has {what}; --cluster-experts renumbers the experts of a model of "
            f"equipoise's own decoder."
        )
    hf_config(model)  # refuses now what no folder can hold
    if ranks < 2:
        raise SpecError(f"--cluster-experts {ranks}: experts are clustered for 2 ranks or more.")
    split_experts(model.experts, ranks=ranks)
    resolved = read_resolved(trained.origin.resolve().parent.parent)
    if not resolved.eval_corpus:
        raise SpecError(
            f"{trained.origin} belongs to a run without held-out documents, on which the share of "
            f"local rows is measured. Train with eval.path."
        )
    store, held = open_store(Path(resolved.corpus)), open_store(Path(resolved.eval_corpus))
    window = resolved.spec.pack.context_tokens
    documents = draw_documents(held.doc_tokens, held_tokens)
    seen = find_trained(held, documents, store)
    documents = np.setdiff1d(documents, seen)
    if not len(documents):
        raise DataError(
            f"All {len(seen):,} held-out documents that fit in {held_tokens:,} tokens are also "
            f"trained. Give others as eval.path."
        )
    fit_pieces = _pieces(store, draw_documents(store.doc_tokens, fitted_tokens), window)
    held_pieces = _pieces(held, documents, window)
    counted, measured = (int((each[:, 2] - each[:, 1]).sum()) for each in (fit_pieces, held_pieces))
    decoder = build_decoder(dataclasses.replace(trained, state=_uncounted(trained.state)))
    progress.start("follow routes", counted + measured)
    try:
        seen_routes = _follow(decoder, store, fit_pieces, progress)
        held_routes = _follow(decoder, held, held_pieces, progress)
    finally:
        progress.finish()
    clusters = cluster_experts(seen_routes.counts(model.experts), ranks)
    tokenizer = load_tokenizer(store.tokenizer_file).tokens_digest
    table = fit_table(seen_routes, clusters.ranks_LX, ranks, model.vocab, tokenizer=tokenizer)
    rates = measure_rates(held_routes, table, clusters.ranks_LX, window)
    state = renumber_experts(trained.state, model, renumbering(clusters.ranks_LX))
    files = ModelFiles({**trained.files.contents, ROUTES: table.to_bytes()}, trained.files.where)
    renumbered = dataclasses.replace(trained, state=state, files=files)
    return Clustered(renumbered, ranks, counted, measured, len(seen), rates)


def _pieces(store: TokenStore, documents: Ints, window: int) -> Pieces:
    return cut_documents(documents, store.doc_tokens, window)


def _uncounted(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what routers counted, which a folder does not keep."""
    return {name: weight for name, weight in state.items() if ".balance." not in name}


def renumber_experts(
    state: dict[str, Tensor], model: ModelSpec, order_LX: Ints
) -> dict[str, Tensor]:
    """The weights of the same model with its experts in another order.

    Args:
        state: By our names.
        model: Its sizes.
        order_LX: The old number of each expert of each sparse layer, int64 [layers, X].
    """
    changed = dict(state)
    sparse = [at for at in range(model.layers) if model.is_sparse(at)]
    for at, order_X in zip(sparse, order_LX, strict=True):
        order = torch.from_numpy(order_X)
        names = [_ROUTER, *(f"feed_forward.experts.{each}.weight" for each in _EXPERTS)]
        for name in (f"layers.{at}.{each}" for each in names):
            changed[name] = state[name][order.to(state[name].device)].contiguous()
    return _uncounted(changed)


def _follow(
    decoder: Decoder, store: TokenStore, pieces: Pieces, progress: Progress
) -> ChosenRoutes:
    """What routers choose for pieces of documents."""
    tokens, previous, chosen = list[Ints](), list[Ints](), list[Ints]()
    by_layer = list[Tensor]()

    def note(_module: object, _args: object, out: tuple[Tensor, ExpertRows, object]) -> None:
        by_layer.append(chosen_experts(out[1]))

    routers = [each for each in decoder.modules() if isinstance(each, Router)]
    hooks = [each.register_forward_hook(note) for each in routers]
    try:
        for batch in _batches(pieces):
            parts = [store.read(*piece) for piece in batch]
            lengths = [len(each) for each in parts]
            text = np.concatenate(parts)
            by_layer.clear()
            with torch.no_grad():
                x_TD = decoder.begin(torch.from_numpy(text))
                decoder.run_layers(x_TD, lengths, decoder.layers)
            before = np.append(NO_TOKEN, text[:-1])
            before[np.cumsum(lengths)[:-1]] = NO_TOKEN
            tokens.append(text)
            previous.append(before)
            chosen.append(torch.stack(by_layer, dim=1).numpy())
            progress.advance(len(text))
    finally:
        for hook in hooks:
            hook.remove()
    return ChosenRoutes(*(np.concatenate(each) for each in (tokens, previous, chosen)))


def _batches(pieces: Pieces) -> Iterator[Sequence[tuple[int, int, int]]]:
    """Pieces in order, some at a time."""
    batch, tokens = list[tuple[int, int, int]](), 0
    for document, start, stop in pieces.tolist():
        if batch and tokens + stop - start > _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append((document, start, stop))
        tokens += stop - start
    if batch:
        yield batch
