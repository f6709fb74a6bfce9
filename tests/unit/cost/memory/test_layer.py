"""What the forecast says of a layer, beside the tensors that a real one holds."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equipoise.cost.memory.layer import token_bytes
from equipoise.nn.attention import pack_attention
from equipoise.nn.decoder import DecoderLayer
from equipoise.nn.rope import rotary_frequencies, rotary_table
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.spec.recompute import LayerRecompute

DENSE = dataclasses.replace(preset("2m"), hidden=64, head_width=16, ffn=176)
SPARSE = dataclasses.replace(preset("moe-3m"), hidden=64, head_width=16, expert_ffn=88)
MODELS = {
    "dense": DENSE,
    "biases and normed heads": dataclasses.replace(DENSE, qkv_bias=True, qk_norm=True),
    "experts": SPARSE,
    "experts, a shared one": dataclasses.replace(SPARSE, shared_ffn=88, norm_top_k=False),
    "experts, a gated one": dataclasses.replace(SPARSE, shared_ffn=88, shared_gate=True),
}
TOKENS = 2048
SETTINGS: tuple[LayerRecompute, ...] = ("none", "attention", "selective", "full")


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operations made while this was active: alive now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        self._made = {key: each for key, each in self._made.items() if not each[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if is_tensor(x)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if is_tensor(x) and (storage := x.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def hold(model: ModelSpec, dtype: torch.dtype, recompute: LayerRecompute) -> tuple[float, float]:
    """Bytes of a token that one layer keeps, and that are alive at most in its backward."""
    layer = DecoderLayer(model, sparse=model.experts > 0).to(dtype)
    layer.recompute = recompute
    for weight in layer.parameters():
        weight.grad = torch.zeros_like(weight)
    x_TD = torch.randn(TOKENS, model.hidden, dtype=dtype).requires_grad_()
    pack = pack_attention([TOKENS // 2, 7, TOKENS // 2 - 7], x_TD.device)
    table = rotary_table(rotary_frequencies(model), pack.positions_T, dtype)
    with LiveBytes() as live:
        stream = x_TD * 1.0
        out = layer(stream, table, pack.attend)
        del stream
        after = out.untyped_storage().nbytes()  # is kept by whatever comes after
        kept = live.now - after
        live.peak = 0
        out.backward(torch.ones_like(out))
        return kept / TOKENS, (live.peak - after) / TOKENS


@pytest.mark.long
@pytest.mark.parametrize("recompute", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_what_is_said(
    name: str, dtype: torch.dtype, recompute: LayerRecompute
) -> None:
    model = MODELS[name]
    kept, most = hold(model, dtype, recompute)
    said = token_bytes(
        model, Layout(), width=dtype.itemsize, sparse=model.experts > 0, recompute=recompute
    )
    assert kept == pytest.approx(said.kept, rel=2e-3)  # what does not grow with tokens is left out
    # Gradients of a layer's weights are counted with the others, and not here.
    weights = dtype.itemsize * 4 * sum(x.numel() for x in (torch.empty(model.hidden, 176),))
    assert said.backward == pytest.approx(most - weights / TOKENS, rel=0.08)


def test_tensor_ranks_divide_all_but_what_is_gathered() -> None:
    model = preset("llama3-8b")
    one, four = (
        token_bytes(model, Layout(tp=n), width=2, sparse=False, recompute="none").kept
        for n in (1, 4)
    )
    gathered = 2 * model.hidden * 2  # both norms' outputs
    assert 4 * (four - gathered) == one - gathered


def test_ranks_that_share_one_key_head_each_keep_it() -> None:
    model = preset("llama3-8b")  # 8 key heads
    eight, sixteen = (
        token_bytes(model, Layout(tp=n), width=2, sparse=False, recompute="selective").kept
        for n in (8, 16)
    )
    keys = 2 * 2 * model.head_width
    assert 2 * (sixteen - keys) == eight - keys
