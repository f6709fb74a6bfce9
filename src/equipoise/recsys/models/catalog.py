"""The dense part that ``model.architecture`` names.

Kept true (tests/unit/recsys/models/test_catalog.py, tests/multi/recsys/test_models.py)
    Every architecture is here, reads the keys that its row names, and equals one process on ranks.
"""

from collections.abc import Sequence

from torch import nn

from equipoise.recsys.models.dcn import DCN
from equipoise.recsys.models.dhen import DHEN
from equipoise.recsys.models.dlrm import DLRM
from equipoise.recsys.models.wukong import Wukong
from equipoise.spec.architectures import ARCHITECTURES, Architecture
from equipoise.spec.recommend import RankModelSpec
from equipoise.spec.tables.table import TableSpec

MODELS: dict[Architecture, type[nn.Module]] = {
    "dlrm": DLRM,
    "dcn": DCN,
    "dhen": DHEN,
    "wukong": Wukong,
}


def build_model(
    spec: RankModelSpec, tables: Sequence[TableSpec], numbers: int, *, seed: int
) -> nn.Module:
    """The dense part of a run.

    Args:
        spec: The architecture and its sizes.
        tables: In the order of their columns in the pooled output.
        numbers: Real numbers of a sample.
        seed: Of the weights.

    Raises:
        ModelError: the sizes do not go together.
    """
    keys = ("bottom", "top", *ARCHITECTURES[spec.architecture].keys)
    sizes = {key: getattr(spec, key) for key in keys}
    return MODELS[spec.architecture](tables, numbers, seed=seed, **sizes)
