"""Continue a text with a trained model, on one process: ``equipoise generate`` as a call.

What it decides
    A text is tokenized as transformers does it, with the special tokens that the tokenizer's
    own rules add. Generation ends at the folder's end tokens, or after a number of tokens.
    Weights compute in the dtype that they are saved in; fp16 and mixed dtypes in fp32.

Kept true (tests/oracle/test_generate.py)
    Greedy continuations equal those of ``transformers`` on the exported folder, token for token.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from equipoise.base.errors import ModelError, SpecError
from equipoise.nn.cached import Cached, CachedDecoder, continue_with
from equipoise.nn.decoder import Decoder
from equipoise.serve.prompt import Prompt, PromptReader
from equipoise.serve.sample import Sampling, choose_token
from equipoise.serve.source import TrainedModel, open_model
from equipoise.serve.text import TextStream

_GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Generated:
    """What followed a prompt."""

    text: str
    ids: tuple[int, ...]
    """The generated tokens, without the end token."""
    prompt_ids: tuple[int, ...]
    stopped: Literal["end", "length"]
    """Whether an end token came, or the number of tokens was reached."""


class Generator:
    """A model that continues texts. What two prompts begin with alike is computed once."""

    def __init__(self, trained: TrainedModel) -> None:
        """Build the decoder around the weights, or take the model of transformers.

        Raises:
            ModelError: there is no tokenizer, or it cannot be read.
        """
        self.trained = trained
        self._prompts = PromptReader(trained.files, trained.model)
        self.tokenizer = self._prompts.tokenizer
        self._cached = _cached(trained)
        self.end_ids = self._prompts.end_ids

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text or of a conversation; never empty.

        Raises:
            ModelError: a token is not in the model's vocabulary, or there is no chat template.
        """
        return self._prompts.encode(prompt)

    def stream(
        self, prompt: Prompt, *, tokens: int, sampling: Sampling = _GREEDY
    ) -> Iterator[str | Generated]:
        """The parts of the text as they become certain, and at last all of it.

        Args:
            prompt: A text, or a conversation: messages with ``role`` and ``content``, which the
                model's chat template writes out.
            tokens: Most tokens to generate, >= 1.
            sampling: How each is chosen.

        Raises:
            SpecError: no token is asked for.
            ModelError: as ``encode``.
        """
        return self.stream_ids(self.encode(prompt), tokens=tokens, sampling=sampling)

    def stream_ids(
        self,
        prompt_ids: Sequence[int],
        *,
        tokens: int,
        sampling: Sampling = _GREEDY,
        advance: Callable[[int], None] | None = None,
    ) -> Iterator[str | Generated]:
        """As ``stream``, of a prompt that ``encode`` has made token ids of.

        Args:
            prompt_ids: At least one token id.
            tokens: Most tokens to generate, >= 1.
            sampling: How each is chosen.
            advance: Called with the number of new tokens whenever more of the prompt is read.

        Raises:
            SpecError: no token is asked for.
            ModelError: logits are not finite.
        """
        if tokens < 1:
            raise SpecError(f"tokens must be at least 1; it is {tokens}.")
        shown, ids, text = TextStream(self.tokenizer.core, prompt_ids), list[int](), ""
        logits_V = continue_with(self._cached, prompt_ids, advance)
        while True:
            if not math.isfinite(largest := float(logits_V.amax())):
                raise ModelError(
                    f"The model's largest logit is {largest}, so no token can be chosen. Check its "
                    "weights."
                )
            token = choose_token(logits_V, sampling, len(prompt_ids) + len(ids))
            if is_end := token in self.end_ids:
                break
            ids.append(token)
            if part := shown.push(token):
                text += part
                yield part
            if len(ids) == tokens:
                break
            logits_V = self._cached.extend([token])
        if part := shown.finish():
            text += part
            yield part
        yield Generated(text, tuple(ids), tuple(prompt_ids), "end" if is_end else "length")

    def generate(self, prompt: Prompt, *, tokens: int, sampling: Sampling = _GREEDY) -> Generated:
        """All of ``stream`` at once."""
        *_, last = self.stream(prompt, tokens=tokens, sampling=sampling)
        assert isinstance(last, Generated)  # noqa: S101 - the stream ends with it
        return last


def generate(
    source: Path | str, prompt: Prompt, *, tokens: int = 256, sampling: Sampling = _GREEDY
) -> Generated:
    """Continue a text with the model of a run, a checkpoint or a Hugging Face folder.

    Args:
        source: Where the model lies.
        prompt: A text to continue, or a conversation to answer.
        tokens: Most tokens to generate, >= 1.
        sampling: How each token is chosen; the likeliest unless given.

    Raises:
        SpecError: nothing is at ``source``, or a setting is out of range.
        CheckpointError: no checkpoint of the run is whole.
        ModelError: the model or its tokenizer cannot be read.
    """
    return Generator(open_model(source)).generate(prompt, tokens=tokens, sampling=sampling)


def _cached(trained: TrainedModel) -> Cached:
    if trained.theirs is None:
        return CachedDecoder(build_decoder(trained))
    # It takes seconds to import, and is an extra.
    from equipoise.parallel.theirs.cached import CachedTheirs

    return CachedTheirs(trained.theirs)


def build_decoder(trained: TrainedModel, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder with its weights; none of them is copied that has its dtype already.

    Args:
        trained: A model that our own decoder computes.
        dtype: What to compute in; unless given, what the weights are saved in if that is fp32 or
            bf16, else fp32.
    """
    # Rows that a capacity drops depend on the micro-batch; a text on its own drops none.
    model = dataclasses.replace(trained.model, capacity_factor=0.0)
    state = trained.state
    dtypes = {weight.dtype for weight in state.values() if weight.is_floating_point()}
    if dtype is None and dtypes not in ({torch.float32}, {torch.bfloat16}):
        dtype = torch.float32
    if dtype is not None:
        state = {
            name: weight.to(dtype) if weight.is_floating_point() else weight
            for name, weight in state.items()
        }
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.load_state_dict(state, assign=True, strict=False)
    for module in decoder.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    return decoder.requires_grad_(False)
