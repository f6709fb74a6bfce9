"""A step in fp64 computes every number in fp64: each kind of model, beside each axis."""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equipoise.comm.group import Ranks
from equipoise.comm.turns import play_ranks
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.spec import ExpertsSpec, PackSpec, StrategyName
from equipoise.train.check.case import Case, Verdict, make_case
from equipoise.train.check.modal import AUDIO, VISION
from equipoise.train.check.prove import check_cases
from equipoise.train.check.sample import References

FP64 = 1e-10
DOC_TOKENS = (17, 3, 1, 9, 6)
DENSE = ModelSpec(
    layers=1, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=61, head_width=6, qk_norm=True
)
SPARSE = dataclasses.replace(
    DENSE, experts=4, top_k=2, expert_ffn=8, shared_ffn=8, shared_gate=True, qk_norm=False
)
BIASED = dataclasses.replace(SPARSE, balance="bias", balance_rate=1.0)
IDLE = dataclasses.replace(BIASED, identity_experts=2, real_top_k=1.5)
SHORT = dataclasses.replace(BIASED, shortcut=True)
SWITCH = dataclasses.replace(BIASED, top_k=1)


def _case(
    model: ModelSpec, experts: str = "fixed", router: str = "", *, over: int = 27, **keys: Any
) -> Case:
    packed = {"policy": keys.get("policy", "by-work"), "context_tokens": over}
    case = make_case(model, 2, **keys)
    return dataclasses.replace(
        case,
        precision="fp64",
        tolerance=FP64,
        doc_tokens=DOC_TOKENS,
        pack=PackSpec(step_tokens=sum(DOC_TOKENS), **packed),
        experts=ExpertsSpec(experts, least_rows=1),
        router=router,
    )


CASES = [
    _case(dataclasses.replace(DENSE, tied=True, qkv_bias=True), tp=2, zero=3),
    *(_case(DENSE, cp=2, strategy=each, zero=2) for each in get_args(StrategyName)[::4]),
    _case(DENSE, pp=2, schedule="zb-h1", policy="in-order"),
    _case(DENSE, policy="divided", over=16, recompute="full"),
    _case(SPARSE, ep=2, zero=2, recompute="selective"),
    _case(BIASED, "exact", "W1", ep=2, zero=3),
    _case(BIASED, "eplb", "W5", ep=2, cp=2),
    _case(BIASED, "tutel", "W5", etp=2),
    _case(IDLE, "auto", "W7", ep=2, zero=1),
    _case(SHORT, "hecate", "W6", ep=2, zero=1, recompute="attention"),
    *(_case(SWITCH, policy, "W2", ep=2) for policy in ("fixed", "exact")),
    dataclasses.replace(_case(SPARSE, ep=2, zero=1), lora=LoraSpec(rank=2)),
    dataclasses.replace(_case(dataclasses.replace(DENSE, qk_norm=False)), vision=VISION),
    dataclasses.replace(_case(dataclasses.replace(DENSE, qk_norm=False)), audio=AUDIO),
]


_WIDENS = torch.ops.aten._to_copy.default


class NarrowWatch(TorchDispatchMode):
    """Notes operations on fp64 and a narrower dtype, and the shapes of what is widened to fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: set[str] = set()
        self.widened: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back with the plain tensors inside
        kwargs = kwargs or {}
        read = set(_dtypes((args, kwargs)))
        out = func(*args, **kwargs)
        wrote = set(_dtypes(out))
        narrow = {each for each in read | wrote if each.itemsize < torch.float64.itemsize}
        if not narrow or torch.float64 not in read | wrote:
            return out
        if func is _WIDENS and wrote == {torch.float64}:
            self.widened.add(tuple(out.shape))
        else:
            self.mixed.add(f"{func}: {sorted(map(str, read))} to {sorted(map(str, wrote))}")
        return out


def _dtypes(values: Any) -> Iterator[torch.dtype]:
    leaves = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    return (each.dtype for each in leaves if each.is_floating_point() and each.numel())


def watch(ranks: Ranks, cases: list[Case]) -> list[tuple[Verdict, NarrowWatch]]:
    """Each case against one rank, and what this rank did to dtypes in both."""
    outcomes, references = [], References()
    for case in cases:
        references.decoder(case)  # whose first weights are drawn in fp32
        with NarrowWatch() as narrow:
            (verdict,) = check_cases(ranks, [case], references=references)
        outcomes.append((verdict, narrow))
    return outcomes


def test_no_number_of_a_step_in_fp64_is_narrower() -> None:
    for outcomes in play_ranks(2, watch, CASES):
        for case, (verdict, narrow) in zip(CASES, outcomes, strict=True):
            assert verdict.error <= FP64, case
            assert narrow.mixed == set(), case
            if not case.resolved.spec.encoders:
                # Rotary angles, which are a function of positions alone.
                assert {(first, *rest) for first, _, *rest in narrow.widened} == {(2, 1, 3)}, case


def test_a_narrower_number_is_noticed() -> None:
    wide = torch.ones(3, dtype=torch.float64)
    with NarrowWatch() as narrow:
        (wide * 2).float().double()
    assert narrow.mixed == {
        "aten._to_copy.default: ['torch.float64'] to ['torch.float32']",
    }
    assert narrow.widened == {(3,)}
    with NarrowWatch() as narrow:
        torch.zeros(3).add_(wide)
        wide + torch.zeros(3)
    assert len(narrow.mixed) == 2
