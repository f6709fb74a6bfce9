"""What other trainers call the keys of run.toml, so that a wrong key leads to the right one.

Kept true (tests/unit/spec/run/test_other_words.py)
    Every word leads to a key that exists, and none is a key's own last word.

Sources
    Arguments of transformers 5 (TrainingArguments, PretrainedConfig), TRL, Megatron-LM,
    torchtitan, DeepSpeed, Lightning, nanoGPT and axolotl.
"""

_WORDS = """
    train.lr              learning_rate base_lr max_lr peak_lr
    train.final_lr_ratio  min_lr min_lr_rate min_lr_ratio end_lr
    train.schedule        lr_scheduler lr_scheduler_type lr_decay_style scheduler lr_schedule
    train.warmup_steps    warmup warmup_ratio num_warmup_steps warmup_iters lr_warmup_iters
    train.decay_steps     num_decay_steps lr_wsd_decay_iters decay_ratio
    train.steps           max_steps num_steps total_steps train_iters max_iters iterations
    train.steps           epochs num_epochs num_train_epochs max_epochs
    train.seed            random_seed
    train.clip_norm       max_grad_norm clip_grad grad_clip gradient_clip_val clip_grad_norm
    train.beta1           adam_beta1
    train.beta2           adam_beta2
    train.eps             adam_epsilon adam_eps
    train.precision       bf16 fp16 dtype torch_dtype mixed_precision
    train.recompute       gradient_checkpointing activation_checkpointing recompute_granularity
    pack.policy           packing sample_packing
    pack.step_tokens      batch_size global_batch_size train_batch_size local_batch_size
    pack.step_tokens      per_device_train_batch_size micro_batch_size
    pack.step_tokens      grad_accum grad_accumulation_steps gradient_accumulation
    pack.step_tokens      gradient_accumulation_steps accumulate_grad_batches
    pack.context_tokens   max_seq_length max_seq_len seq_length seq_len sequence_length sequence_len
    pack.context_tokens   max_length context_length block_size model_max_length cutoff_len
    data.path             dataset dataset_name dataset_path train_file train_files data_path
    data.field            dataset_text_field text_field text_column text_key json_keys
    data.tokenizer        tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_model
    data.loss             assistant_only_loss completion_only_loss train_on_inputs
    model.init            model_name model_name_or_path base_model pretrained
    model.hidden          hidden_size d_model n_embd
    model.layers          num_layers num_hidden_layers n_layer n_layers
    model.heads           num_heads num_attention_heads n_head n_heads
    model.kv_heads        num_key_value_heads num_query_groups n_kv_heads
    model.ffn             intermediate_size ffn_hidden_size
    model.vocab           vocab_size
    model.experts         num_experts num_local_experts
    model.identity_experts  zero_expert_num num_zero_experts
    layout.dp             data_parallel_size dp_size num_gpus nproc_per_node world_size devices
    layout.cp             context_parallel_size context_parallel_degree cp_size
    layout.tp             tensor_parallel_size tensor_model_parallel_size tp_size
    layout.tp             tensor_parallel_degree
    layout.pp             pipeline_parallel_size pipeline_model_parallel_size pp_size
    layout.pp             pipeline_parallel_degree
    layout.ep             expert_parallel_size expert_model_parallel_size ep_size
    layout.zero           zero_stage
    lora.rank             lora_r lora_rank
    lora.alpha            lora_alpha
    lora.targets          lora_targets lora_target_modules target_modules lora_target_linear
    checkpoint.every_steps  save_steps save_interval save_every
    checkpoint.rank_mtbf_hours  mtbf
    checkpoint.keep       save_total_limit keep_latest_k
    journal.wandb         use_wandb wandb_project enable_wandb report_to
    journal.tensorboard   tensorboard_dir enable_tensorboard use_tensorboard logger loggers sinks
    journal.mlflow        use_mlflow
    name                  output_dir out_dir save_dir run_name
"""

OTHER_WORDS: dict[str, str] = {
    word: key
    for key, *words in (line.split() for line in _WORDS.splitlines() if line.strip())
    for word in words
}
"""Keys of run.toml by other trainers' words for them."""


_NO_DROPOUT = (
    "adapters have no dropout, because a random mask would have to be the same on every layout. "
    "Remove it; weight decay (train.weight_decay) also keeps adapters small."
)


_RECOMMEND = (
    "only train, report, pack, plan, simulate and calibrate know model.kind, for runs of "
    'recommenders (model.kind = "recommend"). Leave it out of any other run.'
)


def why_absent(name: str) -> str | None:
    """Why there is no key for what other trainers call by this dotted name, if that is known.

    >>> why_absent("train.lr") is None
    True
    """
    section, _, last = name.replace("-", "_").lower().rpartition(".")
    if name == "model.kind":
        return _RECOMMEND
    is_dropout = last == "lora_dropout" or (section, last) == ("lora", "dropout")
    return _NO_DROPOUT if is_dropout else None


def key_meant(name: str) -> str | None:
    """The key that another trainer calls by the last word of a dotted name, if any.

    >>> key_meant("train.learning-rate"), key_meant("train.step")
    ('train.lr', None)
    """
    return OTHER_WORDS.get(name.rpartition(".")[2].replace("-", "_").lower())
