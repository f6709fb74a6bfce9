"""Functions of ranks in ``test_hf_context``; their first argument is their ``Ranks``."""

from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.cost.curve import counted_curve
from equipoise.parallel.context.attention import (
    context_attention,
    gather_tokens,
    shard_tokens,
    token_positions,
)
from equipoise.parallel.context.batch import ContextCollator, shard_batch
from equipoise.parallel.context.transformers import use_context_parallelism
from equipoise.parallel.context.transformers_trainer import ContextEvaluation
from equipoise.schedule.attention.strategies import STRATEGIES
from equipoise.spec.model.hf_config import model_from_hf_config
from equipoise.spec.run.spec import PackSpec
from support.trainers.tiny import tell_trainers

VOCAB = 61
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    # Scores have a factor other than 1 / sqrt(head width).
    "granite": (transformers.GraniteConfig, {"attention_multiplier": 0.31}),
    # Windows in all layers, and in some.
    "mistral": (transformers.MistralConfig, {"sliding_window": 8}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 8,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # A window that no document is longer than.
    "starcoder2": (transformers.Starcoder2Config, {"sliding_window": 300}),
    # Latent attention: values narrower than keys.
    "deepseek3": (
        transformers.DeepseekV3Config,
        {
            "q_lora_rank": 12,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "experts_implementation": "eager",
        },
    ),
    # Experts, which see one token at a time.
    "mixtral": (
        transformers.MixtralConfig,
        {"num_local_experts": 4, "experts_implementation": "eager"},
    ),
    # Capped scores and logits; caps so low that they change every score.
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 11,
            "attn_logit_softcapping": 0.2,
            "final_logit_softcapping": 0.2,
        },
    ),
    # Attention sinks.
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "head_dim": 8,
            "sliding_window": 11,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
        },
    ),
    # Learned positions.
    "gpt2": (transformers.GPT2Config, {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}),
}


def build(kind: str, dtype: torch.dtype = torch.float64, **changed: Any) -> Any:
    """A tiny model, the same on every rank."""
    config, options = CONFIGS[kind]
    torch.manual_seed(1)
    attention = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    given = {**SIZES, "attn_implementation": attention, **options, **changed}
    model = transformers.AutoModelForCausalLM.from_config(config(**given)).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():  # biases begin as zeros, norms as ones
            weight += 0.02 * torch.randn_like(weight)
    return model.train()


def draw(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens of some documents, and labels; a fifth of these is masked out."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (sum(lengths),), generator=source)
    is_left_out = torch.rand(sum(lengths), generator=source) < 0.2
    return ids, ids.masked_fill(is_left_out, -100)


def one_by_one(model: Any, ids: Tensor, labels: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """Logits, the mean loss and all gradients of the documents, each run alone."""
    model.zero_grad()
    total, count, logits = 0.0, 0, []
    for tokens, wanted in zip(ids.split(lengths), labels.split(lengths), strict=True):
        if not len(tokens):
            continue
        logits.append(model(tokens[None], use_cache=False).logits[0])
        scores, targets = logits[-1][:-1], wanted[1:]
        scores = scores if scores.dtype == torch.float64 else scores.float()
        total = total + cross_entropy(scores, targets, reduction="sum")
        count += int((targets != -100).sum())
    loss = total / max(count, 1)
    loss.backward()
    return [torch.cat(logits).detach(), loss.detach(), *gradients(model)]


def gradients(model: Any) -> list[Tensor]:
    return [weight.grad.clone() for weight in model.parameters()]


def under_autocast(ranks: Ranks, dtype: str) -> tuple[float, float]:
    """How far the loss and the gradients are from fp32 under autocast: over ranks, and alone."""
    lengths = (1, 40, 7, 97, 2)
    ids, labels = draw(lengths)
    model = build("qwen3", torch.float32)
    _, _, *exact = one_by_one(model, ids, labels, lengths)
    with torch.autocast("cpu", getattr(torch, dtype)):
        _, _, *alone = one_by_one(model, ids, labels, lengths)
    use_context_parallelism(model)
    batch = shard_batch(ids, lengths, labels_T=labels, sharding="head-tail-document")
    model.zero_grad()
    with torch.autocast("cpu", getattr(torch, dtype)):
        loss = model(**batch).loss
    loss.backward()
    actual = gradients(model)
    for each in actual:
        dist.all_reduce(each)

    def distance(some: list[Tensor]) -> float:
        off = sum(float((a - b).square().sum()) for a, b in zip(some, exact, strict=True))
        return (off / sum(float(x.square().sum()) for x in exact)) ** 0.5

    return distance(actual), distance(alone)


def share_of_loss(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    """What transformers computes in float32, in the dtype of the logits."""
    sums = cross_entropy(logits[0], batch["shift_labels"][0], reduction="sum")
    return sums / batch["num_items_in_batch"]


@dataclass(frozen=True)
class Case:
    """A model over ranks."""

    kind: str
    lengths: tuple[int, ...]
    strategy: str = "needed-kv"
    sharding: str = "mixed"
    recompute: str = "none"
    """``none``, or the value of ``use_reentrant``."""


@dataclass(frozen=True)
class Told:
    """One rank's largest errors, relative to the largest number."""

    logits: float
    loss: float
    loss_of_transformers: float
    gradient: float
    worst_parameter: str
    attention_calls: int
    masks_built: int


def compare_cases(ranks: Ranks, cases: list[Case]) -> list[Told]:
    return [compare(ranks, case) for case in cases]


def compare(ranks: Ranks, case: Case) -> Told:
    model = build(case.kind)
    ids, labels = draw(case.lengths)
    wanted = one_by_one(model, ids, labels, case.lengths)
    if case.recompute != "none":
        model.activation_checkpointing_enable({"use_reentrant": case.recompute == "True"})
    use_context_parallelism(model)
    masks = count_masks(model)
    places = {"sharding": case.sharding, "ranks_per_node": ranks.world}
    batch = shard_batch(ids, case.lengths, case.strategy, labels_T=labels, **places)
    model.zero_grad()
    out = model(**batch)
    loss = share_of_loss(out.logits, batch)
    loss.backward()
    actual = [loss.detach(), *gradients(model)]
    theirs = out.loss.detach().double()
    for each in (*actual, theirs):
        dist.all_reduce(each)
    held = len(token_positions(case.lengths, **places))  # none is spare
    whole = gather_tokens(out.logits[0, :held].detach(), case.lengths, **places)
    errors = [error(a, b) for a, b in zip([whole, *actual], wanted, strict=True)]
    worst = max(range(2, len(errors)), key=errors.__getitem__)
    return Told(
        errors[0],
        errors[1],
        error(theirs, wanted[1]),
        errors[worst],
        [name for name, _ in model.named_parameters()][worst - 2],
        len(masks),
        sum(masks),
    )


def count_masks(model: Any) -> list[bool]:
    """Whether each call of a layer was given a mask of numbers."""
    masks: list[bool] = []
    for name, module in model.named_modules():
        if name.endswith(("self_attn", ".attn")):
            module.register_forward_pre_hook(
                lambda _, args, given: masks.append(
                    isinstance(given.get("attention_mask"), Tensor)
                    or any(isinstance(x, Tensor) and x.dim() == 4 for x in args)
                ),
                with_kwargs=True,
            )
    return masks


def error(actual: Tensor, wanted: Tensor) -> float:
    scale = float(wanted.abs().max()) if wanted.numel() else 1.0
    return float((actual - wanted).abs().max()) / max(scale, 1e-3) if wanted.numel() else 0.0


def averaged(ranks: Ranks, how: str) -> float:
    """The largest error of a gradient that DDP or FSDP averages, of losses times the ranks."""
    lengths = (30, 41)
    model = build("llama")
    ids, labels = draw(lengths)
    _, _, *wanted = one_by_one(model, ids, labels, lengths)
    model.zero_grad()
    use_context_parallelism(model)
    wrapped = model
    if how == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = DeviceMesh("cpu", torch.arange(ranks.world))
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
    batch = shard_batch(ids, lengths, labels_T=labels, sharding="head-tail-document")
    (share_of_loss(wrapped(**batch).logits, batch) * ranks.world).backward()
    actual = [
        weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        for weight in model.parameters()
    ]
    return max(error(a, b) for a, b in zip(actual, wanted, strict=True))


def in_two_groups(ranks: Ranks) -> float:
    """Two pairs of ranks, each with a pack of its own; the largest error of a gradient."""
    packs = [(30, 41), (9, 5, 26)]
    model = build("llama")
    drawn = [draw(lengths, seed) for seed, lengths in enumerate(packs)]
    ids, labels = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    _, loss, *wanted = one_by_one(model, ids, labels, (*packs[0], *packs[1]))
    step_labels = sum(
        int((each[1:] != -100).sum())
        for lengths, (_, mine) in zip(packs, drawn, strict=True)
        for each in mine.split(lengths)
    )
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    which = ranks.rank // 2
    use_context_parallelism(model)
    model.zero_grad()
    batch = shard_batch(
        drawn[which][0],
        packs[which],
        "ring",
        groups[which],
        labels_T=drawn[which][1],
        sharding="head-tail-document",
        step_labels=step_labels,
    )
    share = share_of_loss(model(**batch).logits, batch)
    share.backward()
    actual = [share.detach(), *gradients(model)]
    for each in actual:
        dist.all_reduce(each)
    return max(error(a, b) for a, b in zip(actual, [loss, *wanted], strict=True))


def change_a_document(ranks: Ranks, kind: str, strategy: str) -> tuple[bool, bool, bool]:
    """Documents 0 and 2 change: whether 1's logits and gradients stay, and whether 0's do."""
    lengths = (33, 40, 17)
    ids, _ = draw(lengths)
    others = torch.cat([(ids[:33] + 1) % VOCAB, ids[33:73], (ids[73:] + 7) % VOCAB])
    nothing = torch.full_like(ids, -100)
    labels = torch.cat([nothing[:33], ids[33:73], nothing[73:]])
    model = build(kind)
    use_context_parallelism(model)
    seen = []
    for each in (ids, others):
        model.zero_grad()
        batch = shard_batch(each, lengths, strategy, labels_T=labels, sharding="head-tail-document")
        logits = model(**batch).logits
        share_of_loss(logits, batch).backward()
        whole = gather_tokens(logits[0].detach(), lengths, sharding="head-tail-document")
        seen.append((whole[33:73], gradients(model), whole[:33]))
    (mine, grads, other), (mine_then, grads_then, other_then) = seen
    return (
        torch.equal(mine, mine_then),
        all(map(torch.equal, grads, grads_then)),
        torch.equal(other, other_then),
    )


def train(ranks: Ranks, steps: int) -> list[float]:
    """The loop of docs/your-code/transformers.md; the losses of all steps."""
    model = build("qwen3", torch.float32)
    use_context_parallelism(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        lengths = STEP_LENGTHS[step % 2]
        ids, labels = draw(lengths, seed=step)
        batch = shard_batch(ids, lengths, labels_T=labels, sharding="head-tail-document")
        loss = model(**batch).loss
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


RATE = 3e-3
STEP_LENGTHS = [(50, 3, 21), (9, 64, 1, 12)]


def train_alone(steps: int) -> list[float]:
    """The same documents one by one, with no ranks."""
    model = build("qwen3", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        lengths = STEP_LENGTHS[step % 2]
        losses.append(float(one_by_one(model, *draw(lengths, seed=step), lengths)[1]))
        optimizer.step()
    return losses


def smollm2(ranks: Ranks, folder: str, tokens: list[list[int]], strategy: str) -> Told:
    """SmolLM2 over ranks, in fp32; rank 0 compares."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lengths = tuple(map(len, tokens))
    ids = torch.tensor([token for each in tokens for token in each])
    use_context_parallelism(model)
    places = {"sharding": "head-tail-document"}
    out = model(**shard_batch(ids, lengths, strategy, **places))
    out.loss.backward()
    loss = out.loss.detach().clone()
    for each in (loss, *(weight.grad for weight in model.parameters())):
        dist.all_reduce(each)
    logits = gather_tokens(out.logits[0].detach(), lengths, **places)
    if ranks.rank:
        return Told(0.0, 0.0, 0.0, 0.0, "", 0, 0)
    actual = gradients(model)
    model.set_attn_implementation("sdpa")
    wanted_logits, wanted_loss, *wanted = one_by_one(model, ids, ids, lengths)
    errors = [error(a, b) for a, b in zip(actual, wanted, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Told(
        error(logits, wanted_logits),
        error(loss, wanted_loss),
        error(loss, wanted_loss),
        errors[worst],
        [name for name, _ in model.named_parameters()][worst],
        0,
        0,
    )


TRAINER_LENGTHS = [50, 1, 97, 33, 8, 8, 120, 64, 5, 18, 2, 41, 77, 30, 1, 90]


def train_with_trainer(
    ranks: Ranks, folder: str, code: str, is_over_ranks: bool, is_bf16: bool = False
) -> tuple[list[float], list[Tensor]]:
    """Losses, and weights after three steps, of the Trainer whose class ``code`` defines."""
    model = build("llama", torch.float32)
    if is_over_ranks:
        use_context_parallelism(model)
    names = trainer_names(code, model)
    arguments = trainer_arguments(ranks, folder, bf16=is_bf16)
    trainer = names["ContextTrainer"](model, arguments, train_dataset=trainer_documents())
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, [weight.detach() for weight in trainer.model.parameters()]


def trainer_documents() -> list[dict[str, list[int]]]:
    source = torch.Generator().manual_seed(0)
    drawn = (torch.randint(VOCAB, (length,), generator=source) for length in TRAINER_LENGTHS)
    return [{"input_ids": each.tolist()} for each in drawn]


def trainer_names(code: str, model: Any) -> dict[str, Any]:
    """What a page's code defines, given a pack and a curve."""
    names: dict[str, Any] = {
        "pack": PackSpec(policy="by-work", context_tokens=128, step_tokens=256),
        "curve": counted_curve(model_from_hf_config(model.config.to_dict())),
    }
    exec(code, names)
    return names


def trainer_arguments(ranks: Ranks, folder: str, **changed: Any) -> transformers.TrainingArguments:
    """Three steps of plain gradient descent, on ranks that are already connected."""
    tell_trainers(ranks)
    given: dict[str, Any] = {
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1e9,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(
        output_dir=f"{folder}/{ranks.rank}", **{**given, **changed}
    )


def train_adapters(
    ranks: Ranks, folder: str, code: str, is_over_ranks: bool
) -> tuple[list[float], list[float], list[Tensor]]:
    """Adapters of peft under Trainer: its losses, held-out losses, and the adapters at the end.

    Over ranks Trainer evaluates after each step; on one rank the documents are run one by one.
    """
    lengths = (30, 1, 9, 64, 2, 17, 5)
    ids, labels = draw(lengths, seed=5)
    pairs = zip(ids.split(lengths), labels.split(lengths), strict=True)
    documents = [{"input_ids": x.tolist(), "labels": y.tolist()} for x, y in pairs]
    torch.manual_seed(2)
    lora = peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False
    )
    model = peft.get_peft_model(build("llama", torch.float32), lora)
    if is_over_ranks:
        use_context_parallelism(model)
    names = trainer_names(code, model)
    held_out: list[float] = []

    class Noting(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not is_over_ranks:
                with torch.no_grad():
                    held_out.append(float(one_by_one_loss(model, ids, labels, lengths)))

        def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
            held_out.append(metrics["eval_loss"])

    class EvaluatingTrainer(ContextEvaluation, names["ContextTrainer"]):  # type: ignore[misc]
        """As the page has it."""

    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3}
    arguments = trainer_arguments(ranks, folder, **(evaluates if is_over_ranks else {}))
    given: dict[str, Any] = {"train_dataset": trainer_documents(), "callbacks": [Noting()]}
    if is_over_ranks:
        collator = ContextCollator("ring", sharding="head-tail-document")
        given |= {"data_collator": collator, "eval_dataset": documents}
    kind = EvaluatingTrainer if is_over_ranks else names["ContextTrainer"]
    trainer = kind(model, arguments, **given)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    trained = [weight.detach() for weight in trainer.model.parameters() if weight.requires_grad]
    return losses, held_out, trained


def one_by_one_loss(model: Any, ids: Tensor, labels: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Mean loss over all labels of documents that are run alone."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, given in zip(ids.split(lengths), labels.split(lengths), strict=True):
        scores = model(input_ids=tokens[None], use_cache=False).logits[0][:-1]
        total = total + cross_entropy(scores.double(), given[1:], reduction="sum")
        count += int((given[1:] != -100).sum())
    return total / count


def compare_eager_functions(ranks: Ranks, lengths: tuple[int, ...]) -> dict[str, float]:
    """Output and all gradients beside transformers' own attention of documents one by one."""
    source = torch.Generator().manual_seed(2)
    wide = {"generator": source, "dtype": torch.float64}
    heads, kv_heads, width = 4, 2, 8
    q, grad_o = (4 * torch.randn(sum(lengths), heads, width, **wide) for _ in range(2))
    k, v = (torch.randn(sum(lengths), kv_heads, width, **wide) for _ in range(2))
    sinks = 2 * torch.randn(heads, **wide)
    layer = torch.nn.Module().train(False)
    layer.num_key_value_groups, layer.sinks = heads // kv_heads, sinks
    errors = {}
    for kind, eager, options in (
        ("gemma2", modeling_gemma2.eager_attention_forward, {"softcap": 1.5}),
        ("gpt_oss", modeling_gpt_oss.eager_attention_forward, {}),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        layer.sinks = leaves[3]
        outs = []
        for parts in zip(*(x.split(lengths) for x in leaves[:3]), strict=True):
            hidden = torch.full((len(parts[0]),) * 2, float("-inf"), dtype=q.dtype).triu(1)
            rows = (x.transpose(0, 1)[None] for x in parts)
            out, _ = eager(layer, *rows, hidden[None, None], scaling=width**-0.5, **options)
            outs.append(out[0])
        wanted = torch.cat(outs)
        is_capped = kind == "gemma2"
        known = leaves[:3] if is_capped else leaves
        wanted_grads = torch.autograd.grad(wanted, known, grad_o)
        for strategy in STRATEGIES:
            how = {"sharding": "head-tail", "ranks_per_node": 2 if ranks.world % 2 == 0 else 1}
            mine = [shard_tokens(x, lengths, **how).detach().requires_grad_() for x in leaves[:3]]
            own = sinks.clone().requires_grad_()
            out = context_attention(
                *mine,
                lengths,
                strategy,
                softcap=1.5 if is_capped else 0.0,
                sinks_H=None if is_capped else own,
                **how,
            )
            inputs = mine if is_capped else [*mine, own]
            grads = list(torch.autograd.grad(out, inputs, shard_tokens(grad_o, lengths, **how)))
            rows = [gather_tokens(x.detach(), lengths, **how) for x in (out, *grads[:3])]
            if not is_capped:
                ranks.sum_(grads[3])
                rows.append(grads[3])
            pairs = zip(rows, (wanted, *wanted_grads), strict=True)
            errors[f"{kind} {strategy}"] = max(
                float((x - y.detach()).abs().max() / y.detach().abs().max()) for x, y in pairs
            )
    return errors


class ContextTrainer(ContextEvaluation, transformers.Trainer):
    """As a user writes it."""


class DefaultCollator:
    """Any other."""


def refused_collator() -> str:
    trainer = ContextTrainer.__new__(ContextTrainer)
    trainer.data_collator = DefaultCollator()
    try:
        trainer.get_eval_dataloader([])
    except LayoutError as error:
        return str(error)
    return ""


def evaluate_with_trainer(ranks: Ranks, folder: str) -> dict[int, tuple[float, float]]:
    """The loss of ``evaluate()`` and the right one, for several batch sizes."""
    lengths = (30, 1, 9, 64, 2, 17, 5)
    ids, labels = draw(lengths)
    pairs = zip(ids.split(lengths), labels.split(lengths), strict=True)
    documents = [{"input_ids": x.tolist(), "labels": y.tolist()} for x, y in pairs]
    model = build("llama", torch.float32)
    _, wanted, *_ = one_by_one(model, ids, labels, lengths)
    model.zero_grad()
    use_context_parallelism(model)
    told = {}
    for size in (1, 3, 7):
        arguments = trainer_arguments(ranks, folder, per_device_eval_batch_size=size)
        collator = ContextCollator("ring", sharding="head-tail-document")
        trainer = ContextTrainer(model, arguments, data_collator=collator, eval_dataset=documents)
        told[size] = (trainer.evaluate()["eval_loss"], float(wanted))
    return told


def evaluate_with_plain_trainer(
    ranks: Ranks, folder: str, is_over_ranks: bool
) -> tuple[float, str, list[int]]:
    """``evaluate()`` of Trainer itself, the model's attention after it, and a text it generates."""
    source = torch.Generator().manual_seed(4)
    lengths = (30, 9, 64, 2, 17, 5)
    drawn = (torch.randint(VOCAB, (length,), generator=source) for length in lengths)
    documents = [{"input_ids": (ids := each.tolist()), "labels": ids} for each in drawn]
    model = build("llama", torch.float32)
    if is_over_ranks:
        use_context_parallelism(model)
        share = shard_batch(torch.arange(9), (9,))
        with torch.no_grad():
            assert model(**share).loss.isfinite()
            del share["context_pack"]  # a share without its pack is not a whole document
            try:
                model(**share)
            except LayoutError:
                pass
            else:
                raise AssertionError("a share was taken for a document")
    arguments = trainer_arguments(ranks, folder, per_device_eval_batch_size=1)
    trainer = transformers.Trainer(model, arguments, eval_dataset=documents)
    loss = trainer.evaluate()["eval_loss"]
    text = model.generate(torch.arange(5)[None], max_new_tokens=6, do_sample=False, pad_token_id=1)
    return loss, model.config._attn_implementation, text[0].tolist()


def compare_adapters(ranks: Ranks, kind: str) -> tuple[float, int]:
    """Error of the loss and of every adapter's gradient over ranks, and how many have one."""
    lengths = (30, 1, 9, 24)
    ids, labels = draw(lengths)
    options = {"target_modules": "all-linear", "init_lora_weights": False}
    torch.manual_seed(2)
    lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(build(kind), lora).double()
    wanted = one_by_one_loss(model, ids, labels, lengths)
    wanted.backward()
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    right = [weight.grad.clone() for weight in adapters]
    model.zero_grad()
    use_context_parallelism(model)
    loss = model(**shard_batch(ids, lengths, labels_T=labels, sharding="head-tail")).loss
    loss.backward()
    mine = [weight.grad.clone() for weight in adapters]
    whole = loss.detach().double()
    for each in (whole, *mine):
        ranks.sum_(each)
    scale = max(float(each.abs().max()) for each in right)
    errors = [float((x - y).abs().max()) / scale for x, y in zip(mine, right, strict=True)]
    return max(abs(float(whole) / float(wanted.detach()) - 1), *errors), len(adapters)
