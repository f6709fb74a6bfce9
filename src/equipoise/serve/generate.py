"""Continue a text with a trained model, on one process: ``equipoise generate`` as a call.

What it decides
    A text is tokenized as transformers does it, with the special tokens that the tokenizer's
    own rules add. Generation ends at the folder's end tokens, or after a number of tokens.
    Weights compute in the dtype that they are saved in; fp16 and mixed dtypes in fp32.

Kept true (tests/oracle/test_generate.py)
    Greedy continuations equal those of ``transformers`` on the exported folder, token for token.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tokenizers
import torch

from equipoise.base.errors import ModelError, SpecError
from equipoise.nn.cached import CachedDecoder, continue_with
from equipoise.nn.decoder import Decoder
from equipoise.nn.hf.files import CONFIG, GENERATION, TOKENIZER
from equipoise.serve.sample import Sampling, choose_token
from equipoise.serve.source import TrainedModel, open_model, require_tokenizer
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
        """Build the decoder around the weights.

        Raises:
            ModelError: there is no tokenizer, or it has more tokens than the model.
        """
        require_tokenizer(trained)
        self.trained = trained
        self._tokenizer = _tokenizer(trained)
        self._cached = CachedDecoder(_decoder(trained))
        self.end_ids = frozenset(trained.files.end_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with what the tokenizer's rules add; never empty."""
        ids = list(self._tokenizer.encode(text).ids)
        return ids or [self._first_id()]

    def stream(
        self, prompt: str | Sequence[int], *, tokens: int, sampling: Sampling = _GREEDY
    ) -> Iterator[str | Generated]:
        """The parts of the text as they become certain, and at last all of it.

        Args:
            prompt: A text, or its token ids.
            tokens: Most tokens to generate, >= 1.
            sampling: How each is chosen.

        Raises:
            SpecError: no token is asked for.
            ModelError: a prompt's token is not in the vocabulary.
        """
        if tokens < 1:
            raise SpecError(f"tokens must be at least 1; it is {tokens}.")
        prompt_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        words = self.trained.model.vocab
        if wrong := [each for each in prompt_ids if not 0 <= each < words]:
            raise ModelError(
                f"The prompt has token {wrong[0]}, and the model's vocabulary has {words:,} tokens."
            )
        shown, ids, text = TextStream(self._tokenizer, prompt_ids), list[int](), ""
        logits_V = continue_with(self._cached, prompt_ids)
        while True:
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

    def generate(
        self, prompt: str | Sequence[int], *, tokens: int, sampling: Sampling = _GREEDY
    ) -> Generated:
        """All of ``stream`` at once."""
        *_, last = self.stream(prompt, tokens=tokens, sampling=sampling)
        assert isinstance(last, Generated)  # noqa: S101 - the stream ends with it
        return last

    def _first_id(self) -> int:
        """What a text without tokens begins with: the token that begins texts, or ends them."""
        for name in (GENERATION, CONFIG):
            first = self.trained.files.table(name).get("bos_token_id")
            if isinstance(first, int):
                return first
        return min(self.end_ids, default=0)


def generate(
    source: Path | str, text: str, *, tokens: int = 256, sampling: Sampling = _GREEDY
) -> Generated:
    """Continue a text with the model of a run, a checkpoint or a Hugging Face folder.

    Args:
        source: Where the model lies.
        text: What to continue.
        tokens: Most tokens to generate, >= 1.
        sampling: How each token is chosen; the likeliest unless given.

    Raises:
        SpecError: nothing is at ``source``, or a setting is out of range.
        CheckpointError: no checkpoint of the run is whole.
        ModelError: the model or its tokenizer cannot be read.
    """
    return Generator(open_model(Path(source))).generate(text, tokens=tokens, sampling=sampling)


def _tokenizer(trained: TrainedModel) -> tokenizers.Tokenizer:
    try:
        core = tokenizers.Tokenizer.from_str(trained.files.contents[TOKENIZER].decode())
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{trained.files.where}/{TOKENIZER} is not a tokenizer.json: {error}."
        ) from None
    core.no_padding()
    core.no_truncation()
    return core


def _decoder(trained: TrainedModel) -> Decoder:
    """The decoder with its weights, none of them copied."""
    # Rows that a capacity drops depend on the micro-batch; a text on its own drops none.
    model = dataclasses.replace(trained.model, capacity_factor=0.0)
    state = trained.state
    dtypes = {weight.dtype for weight in state.values() if weight.is_floating_point()}
    if dtypes not in ({torch.float32}, {torch.bfloat16}):
        state = {
            name: weight.float() if weight.is_floating_point() else weight
            for name, weight in state.items()
        }
    with torch.device("meta"):
        decoder = Decoder(model)
    for name, buffer in decoder.named_buffers():
        state.setdefault(name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    decoder.load_state_dict(state, assign=True, strict=False)
    return decoder.requires_grad_(False)
