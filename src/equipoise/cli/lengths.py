"""Document lengths as ``--lengths`` gives them: a list, a distribution, a file, or the corpus."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.cli.console import make_progress

if TYPE_CHECKING:
    from equipoise.data.mixture import Mixture
    from equipoise.spec.modality.items import Items
    from equipoise.spec.run.resolve import ResolvedRun
    from equipoise.spec.workload import Lengths

_BYTES_PER_TOKEN = 3.3
"""Measured on the standard library, under a byte-level BPE of 4,096 tokens trained on it."""


@dataclass(frozen=True, slots=True)
class DocumentLengths:
    """Lengths of documents, and where they come from."""

    tokens: "Lengths"
    origin: str
    mixture: "Mixture | None" = None
    """How they are mixed, if they are of several sources of a corpus."""
    items: "Items | None" = None
    """Images and sound within the documents of a corpus."""


def document_lengths(
    name: str | None, run: "ResolvedRun", *, least_tokens: int, is_quiet: bool
) -> DocumentLengths:
    """Lengths by name, or of the run's corpus.

    Args:
        name: A list, a distribution, a file, or None for the corpus.
        run: Its ``pack.context_tokens`` is the window to fill.
        least_tokens: Tokens to draw at least from a distribution, documents cut to a window.
        is_quiet: Show no progress.

    Raises:
        DataError: no such distribution and no such file, or a file with no lengths.
        SpecError: a list with a word that is not a length.
    """
    import numpy as np

    from equipoise.spec.workload import (
        distribution_names,
        draw_lengths,
        listed_lengths,
        read_lengths,
    )

    if name is None:
        return _corpus_lengths(run, is_quiet)
    if (listed := listed_lengths(name)) is not None:
        return DocumentLengths(np.array(listed), "--lengths")
    if name not in distribution_names():
        return DocumentLengths(read_lengths(Path(name)), name)
    documents = 4096
    lengths = draw_lengths(name, documents)
    while int(np.minimum(lengths, run.spec.pack.context_tokens).sum()) < least_tokens:
        documents *= 2
        lengths = draw_lengths(name, documents)
    return DocumentLengths(lengths, f"{name} (embedded distribution)")


def _corpus_lengths(run: "ResolvedRun", is_quiet: bool) -> DocumentLengths:
    """Counted if a tokenizer is installed, else estimated from bytes."""
    import numpy as np

    try:
        import tokenizers  # noqa: F401
    except ImportError:
        from equipoise.data.mixture import Mixture
        from equipoise.data.source import open_source

        data = run.spec.data
        sources = [open_source(each, run.base) for each in data.members]
        parts = [np.array([size for size in each.sizes_bytes if size]) for each in sources]
        lengths = np.maximum(1, np.concatenate(parts) / _BYTES_PER_TOKEN).astype(np.int64)
        origin = f"file sizes at {_BYTES_PER_TOKEN} bytes a token (estimated)"
        if not data.is_mixed:
            return DocumentLengths(lengths, origin)
        names, counts = tuple(each.name for each in sources), tuple(map(len, parts))
        mixture = Mixture(names, tuple(row.weight for row in data.mix), counts)
        return DocumentLengths(lengths, origin, mixture)
    from equipoise.data.cache.store import check_vocabulary, prepare
    from equipoise.data.modality.rules import ItemRules

    rules = ItemRules.of(run.spec)
    store = prepare(run.spec.data, run.base, progress=make_progress(is_quiet), rules=rules)
    check_vocabulary(store, run.model.vocab)
    left_out = f"; {store.left_out}" if store.left_out else ""
    origin = f"{store.source_name} (counted{left_out})"
    return DocumentLengths(store.doc_tokens, origin, store.mixture, store.items)
