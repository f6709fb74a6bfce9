"""Merged weights: exact where they can be, refused where they are not of one model."""

from pathlib import Path

import pytest
import torch

from equipoise.base.errors import CheckpointError, SpecError
from equipoise.checkpoint.merge import Merger
from equipoise.serve.source import open_merged
from equipoise.spec.model.presets import ModelSpec
from support.chat.corpus import write_model


def model(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(5, 3, generator=draw),
        "norm": torch.randn(3, generator=draw).bfloat16(),
        "count": torch.tensor([7, 8]),
    }


def merge(*parts: tuple[int, float]) -> dict[str, torch.Tensor]:
    merger = Merger()
    for seed, share in parts:
        merger.add(f"run-{seed}", model(seed), share)
    return merger.merged()


def test_the_mean_of_equal_models_is_that_model_bitwise() -> None:
    merged, whole = merge((3, 1 / 3), (3, 1 / 3), (3, 1 / 3)), model(3)
    assert {key: each.dtype for key, each in merged.items()} == {
        key: each.dtype for key, each in whole.items()
    }
    assert all(torch.equal(merged[key], whole[key]) for key in whole)


def test_a_mean_is_rounded_once_from_float64() -> None:
    merged = merge((0, 0.25), (1, 0.75))
    for key in ("embed", "norm"):
        exact = 0.25 * model(0)[key].double() + 0.75 * model(1)[key].double()
        assert torch.equal(merged[key], exact.to(model(0)[key].dtype))
    assert torch.equal(merged["count"], model(0)["count"])


def test_ends_of_an_interpolation_are_the_models() -> None:
    for share, seed in ((0.0, 0), (1.0, 1)):
        merged = merge((0, 1 - share), (1, share))
        assert all(torch.equal(merged[key], each) for key, each in model(seed).items())


def test_shares_that_do_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"add up to 0\.7"):
        merge((0, 0.5), (1, 0.2))


def refusal(change: dict[str, torch.Tensor], without: str = "") -> str:
    merger = Merger()
    merger.add("a", model(0), 0.5)
    other = model(1) | change
    other.pop(without, None)
    with pytest.raises(CheckpointError) as caught:
        merger.add("b", other, 0.5)
    return str(caught.value)


def test_another_model_is_refused() -> None:
    one_model = "Merge checkpoints of one model."
    assert refusal({}, "norm") == (f"a has the weight norm, which b does not have. {one_model}")
    assert refusal({"bias": torch.zeros(3), "tail": torch.zeros(1)}) == (
        f"b has the weight bias and 1 more, which a does not have. {one_model}"
    )
    assert refusal({"embed": torch.zeros(3, 5)}) == (
        f"embed has the shape [5, 3] in a and [3, 5] in b. {one_model}"
    )
    assert refusal({"count": torch.tensor([7, 9])}) == (
        "count holds whole numbers that differ between a and b, and a mean of them means nothing. "
        f"{one_model}"
    )


def test_numbers_that_are_not_finite_are_refused_before_and_after() -> None:
    for value in (float("nan"), float("inf")):
        assert refusal({"norm": torch.tensor([1.0, value, 1.0])}) == (
            "norm of b has numbers that are not finite, and so would what is merged from it. Give "
            "an older checkpoint of that run."
        )
    merger = Merger()
    merger.add("half", {"w": torch.ones(2).half()}, 0.5)
    merger.add("whole", {"w": torch.tensor([1.0, 4e5])}, 0.5)
    with pytest.raises(CheckpointError) as caught:
        merger.merged()
    assert str(caught.value) == (
        "w has merged numbers up to 200000, more than float16 holds, in which half has it. Name a "
        "model first that has it in float32."
    )


def test_whole_numbers_on_one_side_alone() -> None:
    assert refusal({"norm": torch.tensor([1, 2, 3])}) == (
        "norm holds whole numbers in b alone. Merge checkpoints of one model."
    )


def test_one_model_by_two_names_is_refused(tmp_path: Path) -> None:
    folder, link = tmp_path / "model", tmp_path / "link"
    sizes = ModelSpec(layers=1, hidden=8, heads=1, kv_heads=1, ffn=8, vocab=320, head_width=8)
    write_model(folder, sizes)
    link.symlink_to(folder)
    with pytest.raises(SpecError) as caught:
        open_merged([(folder, 0.5), (link, 0.5)])
    assert str(caught.value) == (
        f"{folder} and {link} are the same model, {folder}. Give each model once."
    )
