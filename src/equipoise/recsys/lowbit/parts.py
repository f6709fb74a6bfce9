"""The parts of a model that may be kept in fewer bits, and models made of chosen formats.

What it decides
    A part is a table or a linear layer. Tables may be fp32, fp16, int8, int4 or int2, a row with
    its own scale and offset; layers fp32, fp16 or int8. A made model adds a bag's rows in their
    order, however ranks divided the table.

Kept true (tests/unit/recsys/lowbit/test_request.py)
    Bytes of a made model are those that its formats promise; of fp32 alone, it scores as before.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from equipoise.numerics.rows import ROW_FORMATS, RowFormat, pack_rows
from equipoise.recsys.lowbit.layers import (
    LayerForm,
    RoundedLinear,
    layer_bytes,
    linears_of,
    swap_module,
)
from equipoise.recsys.rank.pooling import Division, PooledTable, form_bytes
from equipoise.recsys.rank.scorer import Scorer

TABLE_FORMS = ("fp32", "fp16", *ROW_FORMATS)
LAYER_FORMS = ("fp32", "fp16", "int8")
Forms = Mapping[str, str]
"""The format of each part by name; fp32 unless given."""
Ends = Mapping[str, tuple[float, float]]
"""Between which ends the inputs of each layer are rounded."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A table or a layer."""

    name: str
    is_table: bool
    shape: tuple[int, int]
    """Rows and width of a table; inputs and outputs of a layer."""
    has_bias: bool = False

    @property
    def forms(self) -> Sequence[str]:
        """What it may be kept in, fp32 first."""
        return TABLE_FORMS if self.is_table else LAYER_FORMS

    def bytes_of(self, form: str) -> int:
        """Bytes that it takes in a format."""
        if self.is_table:
            return form_bytes(*self.shape, form)
        return layer_bytes(*self.shape, form, has_bias=self.has_bias)


def parts_of(scorer: Scorer) -> list[ModelPart]:
    """All parts of a model: its tables, then its layers as ``layer NAME``."""
    tables = [ModelPart(t.table.name, True, (t.table.rows, t.table.width)) for t in scorer.tables]
    layers = [
        ModelPart(
            f"layer {name}", False, (each.in_features, each.out_features), each.bias is not None
        )
        for name, each in linears_of(scorer.dense).items()
    ]
    return [*tables, *layers]


def make_table(table: PooledTable, form: str) -> PooledTable:
    """A table's rows in a format, rounded to nearest."""
    rows = table.read(torch.arange(table.table.rows))
    if form == "fp32":
        return PooledTable(table.table, rows, None, Division())
    if form == "fp16":
        return PooledTable(table.table, rows.to(torch.float16), None, Division())
    packed: RowFormat = form  # type: ignore[assignment]
    return PooledTable(table.table, pack_rows(rows, packed), packed, Division())


def make_dense(dense: nn.Module, forms: Forms, ends: Ends) -> nn.Module:
    """A dense part whose layers have these formats; the given one stays as it is."""
    made = copy.deepcopy(dense)
    for name, each in linears_of(dense).items():
        form = forms.get(f"layer {name}", "fp32")
        if form != "fp32":
            kept: LayerForm = form  # type: ignore[assignment]
            swap_module(made, name, RoundedLinear.of(each, kept, ends.get(name, (0.0, 1.0))))
    return made


def make_scorer(scorer: Scorer, forms: Forms, ends: Ends) -> Scorer:
    """A model whose parts have these formats."""
    tables = [make_table(each, forms.get(each.table.name, "fp32")) for each in scorer.tables]
    return Scorer(tables, make_dense(scorer.dense, forms, ends))
