"""Encoders sharded over all ranks: gradients of one rank, shares that are kept, bytes counted."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equipoise.comm.group import Ranks
from equipoise.comm.turns import play_ranks
from equipoise.cost.modality import count_weight_traffic, encoder_groups, encoder_params
from equipoise.nn.modality.attach import make_encoders
from equipoise.parallel.modality.api import Modality
from equipoise.parallel.modality.shard import ShardedEncoders
from equipoise.schedule.modality.readers import embedding_places
from equipoise.spec.layout import Layout
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.train.check.items import draw_items, encode_alone
from equipoise.train.check.sample import held_error

SPECS = VisionSpec(layers=2, hidden=16, heads=2, patch=2).encoder, AudioSpec(layers=1).encoder
WIDTH, DOC_TOKENS = 10, (90, 40, 30, 64, 7, 20)
ITEMS = draw_items(DOC_TOKENS, SPECS)


@dataclass(frozen=True)
class Step:
    """What a rank found in one step of encoders alone."""

    errors: dict[str, float]
    """The error of each gradient's part that the rank holds, relative to the largest gradient; a
    weight that has none on either side is left out."""
    kept: int
    """Numbers of weights that the rank keeps."""
    gathered: list[int]
    """Numbers of weights that are whole before the step, after the forward, and at the end."""
    sent_bytes: int
    """Without those of the bridge."""
    messages: int
    """With those of the bridge."""
    bridge_messages: int
    """The messages that the bridge carries among all ranks."""


def _encoders(frozen: tuple[str, ...]) -> nn.ModuleDict:
    return make_encoders([each.with_frozen(frozen) for each in SPECS], WIDTH, 0).double()


def _whole(encoders: nn.ModuleDict) -> int:
    return sum(w.numel() for w in encoders.parameters() if not isinstance(w, DTensor))


def _step(
    ranks: Ranks,
    layout: Layout,
    small_bytes: int,
    documents: tuple[int, ...],
    frozen: tuple[str, ...],
) -> Step:
    """Half the square of every row is its loss; an evaluation comes before."""
    encoders = _encoders(frozen)
    sharded = ShardedEncoders(encoders, ranks, layout, small_bytes=small_bytes)
    modality = Modality(sharded, ITEMS, len(DOC_TOKENS), ranks)
    rows = [
        [(at, 0, DOC_TOKENS[at]) for at in documents[n :: ranks.world]] for n in range(ranks.world)
    ]
    batches = [MicroBatch(np.array(each, dtype=np.int64).reshape(-1, 3)) for each in rows]
    packed = PackedStep("by-work", tuple((each,) for each in batches))

    def embeds(data_rank: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        shares = [np.arange(packed.ranks[data_rank][turn].tokens)]
        return embedding_places(Layout(dp=ranks.world), data_rank, shares)

    planned = modality.plan(packed, 1, embeds)
    with torch.no_grad():
        modality.encode(planned)
    gathered = [_whole(encoders)]
    for counted in (sharded.ledger.sent_bytes, sharded.ledger.sent_messages):
        counted[:] = 0
    encoded = modality.encode(planned)
    gathered.append(_whole(encoders))
    for turn in range(packed.micro_batches):
        if (inserted := encoded.of_turn(turn)) is not None and planned.returns:
            (inserted.rows_ND.square().sum() / 2).backward()
    modality.return_gradients(encoded)
    modality.sum_gradients()
    gathered.append(_whole(encoders))
    bridge_bytes = planned.bytes(WIDTH, element_bytes=8)[ranks.rank].sum()
    return Step(
        _errors(encoders, _alone(documents, frozen)),
        sum(w.to_local().numel() for w in encoders.parameters() if isinstance(w, DTensor)),
        gathered,
        int(sharded.ledger.sent_bytes.sum() - bridge_bytes),
        int(sharded.ledger.sent_messages.sum()),
        planned.messages,
    )


def _alone(documents: tuple[int, ...], frozen: tuple[str, ...]) -> dict[str, Tensor | None]:
    encoders = _encoders(frozen)
    for document in documents:
        inserted = encode_alone(encoders, ITEMS, document, 0, DOC_TOKENS[document])
        if inserted is not None and inserted.rows_ND.requires_grad:
            (inserted.rows_ND.square().sum() / 2).backward()
    return {name: weight.grad for name, weight in encoders.named_parameters()}


def _errors(encoders: nn.ModuleDict, expected: dict[str, Tensor | None]) -> dict[str, float]:
    """Errors by name; a weight that has no gradient on either side is left out."""
    scale = max(
        (float(each.abs().max()) for each in expected.values() if each is not None), default=1.0
    )
    errors = {}
    for name, weight in encoders.named_parameters():
        grad, reference = weight.grad, expected[name]
        if grad is not None:
            reference = torch.zeros(weight.shape).double() if reference is None else reference
            errors[name] = held_error(grad, reference, scale)
        elif reference is not None:
            errors[name] = math.inf
    return errors


FROZEN = [
    (1, ()),
    (2, ("encoders.image",)),
    (2, ("encoders.image.layers.0",)),
    (2, ("encoders.audio.embed",)),
    (2, ("encoders.*.embed", "encoders.*.layers", "encoders.*.norm")),
    (3, ("encoders.image.embed", "encoders.image.layers.0", "encoders.audio")),
    (2, ("encoders",)),
    (4, ()),
]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "frozen"), FROZEN)
def test_gradients_are_one_ranks_with_frozen_weights(
    ranks: int, zero: int, frozen: tuple[str, ...]
) -> None:
    layout, documents = Layout(dp=ranks, zero=zero), (0, 1, 3, 4)
    steps = play_ranks(ranks, _step, layout, 0, documents, frozen)
    specs = [each.with_frozen(frozen) for each in SPECS]
    names = [(each, name) for each in specs for name in each.shapes(WIDTH)]
    trained = {f"{each.kind}.{name}" for each, name in names if name not in each.frozen}
    counted = count_weight_traffic(specs, WIDTH, layout, element_bytes=8, small_bytes=0)
    for each in steps:
        assert max(each.errors.values(), default=0.0) < 1e-12
        assert set(each.errors) == trained
        assert each.gathered[0] == each.gathered[2] == 0
        # What has no backward is freed as soon as its rows are made.
        whole = sum(encoder_params(spec, WIDTH) for spec in specs if not spec.is_frozen)
        assert each.gathered[1] == (0 if zero == 3 else whole)
    assert sum(each.sent_bytes for each in steps) == counted.sent_bytes
    messages = sum(each.messages for each in steps) - steps[0].bridge_messages
    assert messages == counted.messages


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("documents", [(4,), ()])
def test_ranks_without_items_take_part(zero: int, documents: tuple[int, ...]) -> None:
    steps = play_ranks(4, _step, Layout(dp=4, zero=zero), 0, documents, ())
    for each in steps:
        assert len(each.errors) == len(list(_encoders(()).parameters()))
        assert max(each.errors.values()) < 1e-12


@pytest.mark.parametrize(
    ("layout", "small_bytes", "between"),
    [
        (Layout(dp=4, zero=0), 0, 1),
        (Layout(dp=4, zero=1), 0, 1),
        (Layout(dp=4, zero=2), 0, 1),
        (Layout(dp=4, zero=3), 0, 0),
        (Layout(dp=4, zero=3), 1 << 20, 1),
        (Layout(dp=4, zero=3, replicas=2), 0, 0),
        (Layout(dp=4, zero=2, replicas=2), 0, 1),
    ],
)
def test_a_rank_keeps_its_share_and_sends_what_is_counted(
    layout: Layout, small_bytes: int, between: int
) -> None:
    groups = [group for spec in SPECS for group in encoder_groups(spec, WIDTH, layout)]
    params, owned = (sum(getattr(each, name) for each in groups) for name in ("params", "owned"))
    steps = play_ranks(4, _step, layout, small_bytes, (0, 1, 3), ())
    assert [each.gathered for each in steps] == [[0, between * params, 0]] * 4
    kept = [each.kept for each in steps]
    assert max(kept) == owned and sum(kept) == params * 4 // layout.shards
    counted = count_weight_traffic(SPECS, WIDTH, layout, element_bytes=8, small_bytes=small_bytes)
    assert sum(each.sent_bytes for each in steps) == counted.sent_bytes
    messages = sum(each.messages for each in steps) - steps[0].bridge_messages
    assert messages == counted.messages
    moves = 0 if layout.shards == 1 else 3 if layout.zero == 3 and not small_bytes else 2
    assert messages == 4 * len(groups) * moves * (layout.shards - 1)
