"""A small model, samples and settings for the trainers of other libraries."""

import os
from typing import Any

import torch
import transformers

from equipoise.comm.group import Ranks

LENGTHS = [50, 3, 97, 33, 8, 8, 120, 64, 5, 18, 2, 41, 77, 30, 4, 90]
VOCAB = 67
GIVEN: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 1e9,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def tell_trainers(ranks: Ranks) -> None:
    """Say which rank this is, as torchrun does; it is connected already."""
    os.environ |= {
        "RANK": str(ranks.rank),
        "LOCAL_RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world),
        "MASTER_ADDR": "127.0.0.1",  # read, not used
        "MASTER_PORT": "1",
    }


def tiny_llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        attn_implementation="sdpa",
        pad_token_id=0,
    )
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config)


def samples() -> Any:
    import datasets

    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


def words() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(at): at for at in range(VOCAB)}, unk_token="0"))
