"""A decoder whose tokens lie in another order computes what it did, in the order of the text."""

import pytest
import torch
from torch import Tensor

from equipoise.nn.decoder import Decoder, initialize
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import Recompute

MODEL = ModelSpec(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=31, head_width=8)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_logits_loss_and_gradients_are_those_of_tokens_in_order(recompute: Recompute) -> None:
    plain, other = (Decoder(MODEL).double() for _ in range(2))
    tokens = torch.randint(31, (20,), generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []

    def place(tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        seen.append(positions_T)
        return torch.argsort(tokens_T * 7 % 5, stable=True)

    other.place_tokens = place
    for each in (plain, other):
        initialize(each, 0)
        each.set_recompute(recompute)
        each(tokens, (3, 0, 17), labels_T=tokens).backward()
    assert seen[0].tolist() == [*range(3), *range(17)]
    for mine, whole in zip(other.parameters(), plain.parameters(), strict=True):
        assert (mine.grad - whole.grad).abs().max() <= 1e-12 * whole.grad.abs().max()
    with torch.no_grad():
        ours, theirs = other(tokens, (3, 0, 17)), plain(tokens, (3, 0, 17))
        empty = other(tokens[:0], (), labels_T=tokens[:0])
    assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    assert float(empty) == 0.0
