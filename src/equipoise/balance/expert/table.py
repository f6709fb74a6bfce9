"""The table of routes of a run: where it is, and that it is of the run's model.

What it decides
    Tokens of one model lie badly by the table of another, though nothing is computed wrongly. So a
    table says how many experts, sparse layers and choices its routes had, and which tokens; a run
    that has others is refused before it starts. Weights are not compared: a model that trains on
    keeps its table. Tables of earlier versions say none of it, and are taken by their vocabulary.

Kept true (tests/unit/serve/test_routes.py, tests/multi/parallel/test_speculative.py)
    The table of another model, number of ranks or tokenizer is refused.
"""

from pathlib import Path

from equipoise.balance.expert.routes import ROUTES, RouteTable, read_table, routed_sizes
from equipoise.base.errors import LayoutError, SpecError
from equipoise.base.read import user_path
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import RunSpec


def require_table(table: RouteTable, model: ModelSpec, *, tp: int) -> None:
    """Refuse the table of another model or number of ranks.

    Raises:
        LayoutError: says what it is of, and what is needed.
    """
    fix = f"Make one with equipoise convert --cluster-experts {tp}."
    if (table.ranks, table.vocab) != (tp, model.vocab):
        raise LayoutError(
            f"The table of experts.routes is for {table.ranks} ranks and {table.vocab:,} tokens, "
            f"but the run has tp = {tp} and {model.vocab:,} tokens. {fix}"
        )
    sizes = routed_sizes(model)
    if table.made_from and table.made_from != sizes:
        made, own = (
            f"{top_k} of {experts} experts in {layers} layers"
            for experts, layers, top_k in (table.made_from, sizes)
        )
        raise LayoutError(
            f"The table of experts.routes was made from another model, whose tokens choose {made}; "
            f"those of the run's choose {own}. {fix}"
        )


def require_same_tokens(file: str, tokenizer: str) -> None:
    """Refuse a table whose tokens stand for other texts than the run's.

    Args:
        file: The table, as ``find_table`` names it; "" for none.
        tokenizer: Digest of the tokens of the run's corpus by their ids.

    Raises:
        LayoutError: it was made with another tokenizer.
    """
    made_with = read_table(Path(file)).tokenizer if file else ""
    if made_with not in ("", tokenizer):
        raise LayoutError(
            f"The table of experts.routes, {file}, was made with other tokens (digest "
            f"{made_with[:8]}) than those of the run's corpus ({tokenizer[:8]}). Set "
            f"data.tokenizer to the tokenizer of the model that the table was made from."
        )


def find_table(spec: RunSpec, base: Path, init_folder: str, model: ModelSpec) -> str:
    """The table of a run that speculates; "" for any other.

    Args:
        spec: The run's keys.
        base: The folder that paths in it are relative to.
        init_folder: Of the first weights; "" where they are random.
        model: Its sizes.

    Raises:
        SpecError: no table is named, or it cannot be read.
        LayoutError: it is of another model or number of ranks.
    """
    if spec.experts.policy != "speculative":
        return ""
    if not spec.experts.routes and not init_folder:
        raise SpecError(
            'experts.policy = "speculative" needs a table of routes. Make one with equipoise '
            'convert RUN TO --cluster-experts RANKS, and begin from it: model.init = "hf:TO".'
        )
    given = user_path(spec.experts.routes)
    file = base / given if spec.experts.routes else Path(init_folder) / ROUTES
    require_table(read_table(file), model, tp=spec.layout.tp)
    return str(file.resolve())
