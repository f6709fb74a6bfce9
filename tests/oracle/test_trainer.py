"""Packed micro-batches under Hugging Face's Trainer: same gradients, no document reads another."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.cost.curve import LoadCurve, counted_curve
from equipoise.data.loader import (
    PackedDataset,
    PackedLoader,
    collate_for_transformers,
    collate_packed,
)
from equipoise.data.sampler import PackedBatchSampler
from equipoise.data.turn import PieceIndex, Turn
from equipoise.spec.model.hf_config import model_from_hf_config
from equipoise.spec.run.spec import PackSpec
from support.trainers.tiny import tell_trainers

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

LENGTHS = [50, 1, 97, 33, 8, 8, 120, 64, 5, 18, 2, 41, 77, 30, 1, 90]  # 645 tokens: 3 steps
VOCAB = 67
PACK = PackSpec(policy="by-work", context_tokens=64, step_tokens=256)
RATE = 2.0


def tiny_llama(dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        attn_implementation="sdpa",
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).to(dtype)


def make_documents() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]
    return [{"input_ids": row} for row in rows]


def curve_of(model: Any) -> LoadCurve:
    return counted_curve(model_from_hf_config(model.config.to_dict()))


def trainer_of_the_page(pack: PackSpec) -> Any:
    """The class that docs/your-code/other-trainers.md shows."""
    page = (Path(__file__).parents[2] / "docs" / "your-code" / "other-trainers.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    body = block[block.index("class PackedTrainer") :].strip().splitlines()
    assert len(body) < 10
    names = {
        "counted_curve": counted_curve,
        "pack": pack,
        "PackedBatchSampler": PackedBatchSampler,
        "PackedLoader": PackedLoader,
    }
    exec(block, names)
    return names["PackedTrainer"]


def train(
    folder: Path,
    *,
    resume: bool = False,
    pack: PackSpec = PACK,
    documents: list | None = None,
    **changed: Any,
) -> Any:
    """A model trained by Trainer, plain gradient descent at a constant rate."""
    given: dict[str, Any] = {
        "max_steps": 3,
        "gradient_accumulation_steps": 4,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1e9,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **{**given, **changed})
    kind = trainer_of_the_page(pack)
    trainer = kind(tiny_llama(), arguments, train_dataset=documents or make_documents())
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


def require_same_weights(model: Any, wanted: Any, bound: float) -> None:
    for (name, weight), other in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert float((weight - other).detach().abs().max()) <= bound, name


def document_gradients(
    model: Any, pieces: list[PieceIndex], documents: list | None = None
) -> list[Tensor]:
    """Gradients of the mean loss over all labels of some pieces, one piece after the other."""
    documents = documents or make_documents()
    model.zero_grad()
    total, labels = torch.zeros((), dtype=torch.float64), 0
    for document, start, stop, *_ in pieces:
        ids = torch.tensor(documents[document]["input_ids"])
        given = documents[document].get("labels", ids)
        wanted = torch.as_tensor(given)[start + 1 : stop + 1]
        logits = model(ids[None, start:stop], use_cache=False).logits[0, : len(wanted)]
        total = total + cross_entropy(logits.double(), wanted, reduction="sum")
        labels += int((wanted != -100).sum())
    (total / labels).backward()
    return [weight.grad.clone() for weight in model.parameters()]


def trained_one_by_one(steps: int, documents: list | None = None) -> Any:
    """The model after some steps on the same pieces, with no packing and no Trainer."""
    model = tiny_llama()
    sampler = PackedBatchSampler(LENGTHS, PACK, ranks=1, rank=0, curve=curve_of(model))
    pieces: dict[tuple[int, int], list[PieceIndex]] = {}
    while len(pieces) < steps:
        for batch in sampler:
            turn = batch[0].turn
            assert turn.micro_batches == 4
            pieces.setdefault((turn.epoch, turn.step), []).extend(batch)
    for step in sorted(pieces)[:steps]:
        gradients = document_gradients(model, pieces[step], documents)
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight -= RATE * gradient
    return model


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("three"))


def test_three_steps_of_trainer_equal_documents_one_by_one(three_steps):
    require_same_weights(three_steps, trained_one_by_one(3), 1e-6)
    start = tiny_llama()
    moved = [
        float((a - b).detach().abs().max())
        for a, b in zip(three_steps.parameters(), start.parameters(), strict=True)
    ]
    assert min(moved) > 1e-4  # a hundred times the bound


def test_trainer_goes_through_epochs_in_their_own_order(tmp_path):
    require_same_weights(train(tmp_path, max_steps=5), trained_one_by_one(5), 1e-6)


@pytest.mark.parametrize("saved", [2, 3, 4])
def test_trainer_resumes_within_an_epoch_and_at_its_edge(tmp_path, saved):
    assert (
        len(PackedBatchSampler(LENGTHS, PACK, ranks=1, rank=0, curve=curve_of(tiny_llama()))) == 12
    )
    train(tmp_path, max_steps=saved, save_strategy="steps", save_steps=saved)
    resumed = train(tmp_path, max_steps=5, resume=True)
    require_same_weights(resumed, trained_one_by_one(5), 1e-6)


def test_the_policy_changes_no_weight(tmp_path):
    shared = {"context_tokens": 64, "step_tokens": 256, "cut": "windows"}
    by_work = train(tmp_path, pack=PackSpec(policy="by-work", **shared))
    in_order = train(tmp_path, pack=PackSpec(policy="in-order", **shared))
    require_same_weights(by_work, in_order, 1e-6)


def test_prompts_without_labels_are_not_trained_on(tmp_path):
    documents = make_documents()
    for each in documents:
        half = len(each["input_ids"]) // 2
        each["labels"] = [-100] * half + each["input_ids"][half:]
    model = train(tmp_path, documents=documents)
    require_same_weights(model, trained_one_by_one(3, documents), 1e-6)


def test_a_rank_without_documents_has_a_gradient_of_exactly_zero():
    model = tiny_llama()
    sampler = PackedBatchSampler([8], PACK, ranks=2, rank=1, curve=curve_of(model))
    (batch,) = PackedLoader(make_documents()[4:5], sampler, collate=collate_for_transformers)
    loss = model(**batch).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(float(weight.grad.abs().max()) == 0.0 for weight in model.parameters())


def train_on(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    """Half the micro-batches on each rank, so the same steps as one rank takes."""
    tell_trainers(ranks)
    model = train(folder / "run", gradient_accumulation_steps=2, ddp_backend="gloo")
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def test_two_ranks_of_trainer_equal_one(tmp_path, three_steps):
    for weights in run_ranks(2, train_on, tmp_path):
        model = tiny_llama()
        model.load_state_dict(weights)
        require_same_weights(model, three_steps, 1e-6)


def step_gradients(policy: str, ranks: int) -> dict[int, list[Tensor]]:
    """Of each step, the sum over ranks of ``model(**batch).loss.backward()`` in float64."""
    model, sums = tiny_llama(torch.float64), {}
    pack = PackSpec(policy=policy, context_tokens=64, step_tokens=256, cut="windows")
    for rank in range(ranks):
        sampler = PackedBatchSampler(LENGTHS, pack, ranks=ranks, rank=rank, curve=curve_of(model))
        loader = PackedLoader(make_documents(), sampler, collate=collate_for_transformers)
        order = list(sampler)
        loader.set_epoch(0)
        for indices, batch in zip(order, loader, strict=True):
            model.zero_grad()
            model(**batch).loss.backward()
            gradients = [weight.grad.clone() for weight in model.parameters()]
            step = indices[0].turn.step
            before = sums.get(step, [torch.zeros_like(each) for each in gradients])
            sums[step] = [a + b for a, b in zip(before, gradients, strict=True)]
    return sums


def test_gradients_of_two_ranks_by_work_equal_in_order_and_documents_one_by_one():
    by_work, in_order = step_gradients("by-work", 2), step_gradients("in-order", 2)
    pack = PackSpec(policy="in-order", context_tokens=64, step_tokens=256, cut="windows")
    sampler = PackedBatchSampler(LENGTHS, pack, ranks=1, rank=0)
    pieces: dict[int, list[PieceIndex]] = {}
    for batch in sampler:
        pieces.setdefault(batch[0].turn.step, []).extend(batch)
    assert sorted(pieces) == [0, 1, 2]
    for step, mine in pieces.items():
        # transformers takes the loss in float32, whatever the model's type.
        alone = document_gradients(tiny_llama(torch.float64), mine)
        for a, b, c in zip(by_work[step], in_order[step], alone, strict=True):
            scale = float(c.abs().max())
            assert float((a - b).abs().max()) <= 1e-6 * scale
            assert float((a - c).abs().max()) <= 1e-6 * scale


def packed(rows: list[list[int]], collate: Any) -> dict[str, Any]:
    pieces = PackedDataset([{"input_ids": row} for row in rows])
    turn = Turn(0, 0, 0, 1, 1)
    return collate([pieces[PieceIndex(d, 0, len(r), len(r), turn)] for d, r in enumerate(rows)])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_document_reads_another(attention):
    model = tiny_llama()
    model.set_attn_implementation(attention)
    model.config.use_cache = True  # as configs come; the batch turns it off
    rows = [list(range(1, 20)), [3], list(range(30, 60)), [4, 5]]
    changed = [[7] * 19, rows[1], rows[2], [8, 9]]
    with torch.no_grad():
        batch = packed(rows, collate_for_transformers)
        logits = model(**batch).logits[0]
        others = model(**packed(changed, collate_for_transformers)).logits[0]
        assert not torch.equal(logits[:19], others[:19])
        assert torch.equal(logits[19:50], others[19:50])
        bounds = batch["cu_seq_lens_q"].tolist()
        for row, start, stop in zip(rows, bounds, bounds[1:], strict=False):
            alone = model(torch.tensor([row]), use_cache=False).logits[0]
            torch.testing.assert_close(logits[start:stop], alone, rtol=0, atol=1e-6)


def test_a_change_of_one_document_leaves_the_gradients_of_another():
    model = tiny_llama()
    rows, changed = [[1, 2, 3, 4], [5, 6, 7]], [[9, 8, 9, 8], [5, 6, 7]]
    found = []
    for each in (rows, changed):
        batch = packed(each, collate_for_transformers)
        batch["shift_labels"][0, :4] = -100  # the loss of the second alone
        model.zero_grad()
        model(**batch).loss.backward()
        found.append([weight.grad.clone() for weight in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_tensors_are_those_of_the_flattening_collator():
    rows = [[1, 2, 3], [4], [5, 6, 7, 8]]
    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    wanted = flatten([{"input_ids": row} for row in rows])
    found = packed(rows, collate_for_transformers)
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name
    plain = packed(rows, collate_packed)
    assert torch.equal(plain["cu_seqlens"], wanted["cu_seq_lens_q"])
