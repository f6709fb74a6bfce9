"""Build a model with transformers' own modules from a folder, or refuse it.

What it decides
    The model is what transformers makes of the folder, in fp32: never a download, never code of
    the folder, weights from safetensors alone, and none of them missing, left over or of another
    shape. A folder without any weights gives random ones, drawn from the run's seed.

    What a step could not compute exactly under every packing and layout is refused by name:
    dropout, noise and auxiliary losses of routers, frequencies that depend on a pack's longest
    document, quantised weights. ``parallel.context.transformers`` refuses the rest.

Kept true (tests/oracle/test_engine_models.py)
    Logits of a built model equal transformers' own; the whole text of each refusal.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from equipoise.base.errors import ModelError
from equipoise.parallel.context.transformers import register_attention
from equipoise.parallel.context.transformers_rope import length_dependent_types, switch_lengths
from equipoise.parallel.theirs.head import read_head
from equipoise.parallel.theirs.model import CONFIG, TransformersModel
from equipoise.spec.model.presets import ModelSpec

Prepare = Callable[[PreTrainedModel], PreTrainedModel]
"""What becomes of a whole model before it is sharded, such as adapters or frozen weights."""

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
_NAMES_SHOWN = 3
_NOT_HERE = ("classifier", "summary", "cross", "detach")
"""Words of dropout settings that concern parts that a causal language model does not have."""


def build_theirs(
    folder: Path,
    model: ModelSpec,
    *,
    seed: int,
    context_tokens: int,
    prepare: Prepare | None = None,
) -> TransformersModel:
    """The model of a folder, with its weights, on the CPU in fp32.

    Args:
        folder: Has config.json and, unless weights are to be random, safetensors.
        model: Its sizes, for prices.
        seed: Of random weights.
        context_tokens: Longest document of the run [tokens].
        prepare: Changes the whole model before anything is sharded.

    Raises:
        ModelError: transformers cannot build it, or it would not be exact.
    """
    theirs = load_theirs(folder, seed=seed)
    text = (folder / CONFIG).read_text()
    return wrap_theirs(
        theirs, model, context_tokens=context_tokens, prepare=prepare, config_text=text
    )


def wrap_theirs(
    theirs: PreTrainedModel,
    model: ModelSpec,
    *,
    context_tokens: int,
    prepare: Prepare | None = None,
    config_text: str = "",
) -> TransformersModel:
    """A model of transformers as the package trains it; arguments as ``build_theirs`` has them.

    Raises:
        ModelError: it would not be exact.
    """
    require_trainable(theirs, context_tokens)
    head = read_head(theirs)
    register_attention(theirs)
    if prepare is not None:
        theirs = prepare(theirs)
    theirs.train()
    return TransformersModel(theirs, model, head, config_text)


def read_theirs_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a folder, as transformers reads it.

    Raises:
        ModelError: transformers does not know this kind of model, or the file is damaged.
    """
    with said(folder):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return config


def build_random(config: PreTrainedConfig, seed: int, *, device: str = "cpu") -> PreTrainedModel:
    """A model with random weights, in fp32; on the device ``meta`` it has only names and shapes.

    Raises:
        ModelError: transformers cannot build it.
    """
    with said(config.model_type), torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        theirs: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    return theirs


def load_theirs(folder: Path, *, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a folder, with eager attention; without any weights a random one, in fp32.

    Raises:
        ModelError: transformers cannot build it, or its weights are not all there.
    """
    config = read_theirs_config(folder)
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{folder} holds quantised weights (quantization_config), which cannot be trained. "
            f"Use the model's unquantised folder."
        )
    files = sorted(path.name for path in folder.iterdir())
    if not any(name.endswith(".safetensors") for name in files):
        if held := [name for name in files if name.endswith(_OTHER_WEIGHTS)]:
            raise ModelError(
                f"{folder} has {held[0]} and no safetensors, and a run's first weights would be "
                f"random. Save the model as safetensors."
            )
        return build_random(config, seed)
    with said(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    theirs: PreTrainedModel = loaded[0]
    _require_whole(folder, loaded[1])
    return theirs


def _require_whole(folder: Path, told: dict[str, Any]) -> None:
    """Refuse weights that transformers would draw at random, or leave out."""
    for key, what in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has weights that the model has no place for:"),
        ("mismatched_keys", "has weights of another shape than its config.json says:"),
    ):
        names = sorted(str(each[0] if isinstance(each, tuple) else each) for each in told[key])
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise ModelError(
                f"{folder} {what} {', '.join(names[:_NAMES_SHOWN])}{more}. Give a folder that "
                f"transformers saved whole."
            )


@contextmanager
def said(what: object) -> Iterator[None]:
    """Errors of transformers in one sentence, as a ``ModelError``; its bars stay unsaid."""
    try:
        with silenced():
            yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")
        raise ModelError(f"transformers cannot build the model of {what}: {reason}.") from error


@contextmanager
def silenced() -> Iterator[None]:
    """Warnings and progress bars of transformers stay unsaid."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def require_trainable(theirs: PreTrainedModel, context_tokens: int) -> None:
    """Refuse a model whose loss or gradients would depend on packing, layout or chance.

    Args:
        theirs: The model.
        context_tokens: Longest document of the run [tokens].

    Raises:
        ModelError: says what is not exact, and what to change.
    """
    name, config = type(theirs).__name__, theirs.config.get_text_config()
    for key, value in config.to_dict().items():
        if not _is_chance(key) or any(word in key for word in _NOT_HERE):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            raise ModelError(
                f"{name} draws at random in training ({key} = {value:g}), so that no two layouts "
                f"have the same loss. Set {key} to 0 in its config.json."
            )
    for part, module in theirs.named_modules():
        share = getattr(module, "p", None)
        if isinstance(module, nn.modules.dropout._DropoutNd) and share:
            raise ModelError(
                f"{name} drops values at random in training ({part}, {share:g}), so that no two "
                f"layouts have the same loss. Set its dropout to 0 in config.json."
            )
    for part, weight in theirs.named_parameters():
        if not weight.is_floating_point():
            raise ModelError(
                f"{name} has weights that are not floats ({part}, {weight.dtype}). Use the "
                f"model's unquantised folder."
            )
    words = theirs.get_input_embeddings()
    limit = getattr(config, "max_position_embeddings", None) or 0
    for part, module in theirs.base_model.named_modules():
        if not isinstance(module, nn.Embedding) or module is words:
            continue
        if limit <= module.num_embeddings <= limit + 2 and context_tokens > limit:
            raise ModelError(
                f"{name} has learned positions ({part}) for {limit:,} tokens, and documents have "
                f"up to {context_tokens:,}. Set pack.context_tokens to {limit:,} or less."
            )
    types, switches = length_dependent_types(config), switch_lengths(config)
    if types and context_tokens > min(switches, default=0):
        limit = min(switches, default=0)
        raise ModelError(
            f"{name} has RoPE of type {', '.join(types)}: beyond {limit:,} tokens its frequencies "
            f"depend on the longest document of a pack, so that no two packings have the same "
            f"loss. Set pack.context_tokens to {limit:,} or less."
        )


def _is_chance(key: str) -> bool:
    return "dropout" in key or "pdrop" in key or "layerdrop" in key or key.endswith("jitter_noise")
