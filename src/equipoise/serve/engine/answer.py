"""One answer while it grows: its tokens, its text, and whether it ends.

Kept true (tests/unit/serve/engine/test_loop.py)
    Texts joined are the text of all tokens up to a stop string; an answer ends once.
"""

from collections.abc import Sequence

import numpy as np
import tokenizers
import torch
from torch import Tensor

from equipoise.serve.engine.request import (
    Event,
    Finish,
    GenerateRequest,
    Handle,
    PromptEmbedded,
    PromptScored,
    Score,
    TokenEvent,
)
from equipoise.serve.sample import TokenCounts, adjust, choose_token, log_probabilities
from equipoise.serve.text import StopStrings, TextStream


class LiveAnswer:
    """The state of one request that the scheduler does not know: ids and text."""

    def __init__(
        self,
        request: GenerateRequest,
        handle: Handle,
        core: tokenizers.Tokenizer,
        *,
        end_ids: frozenset[int],
        most_tokens: int,
        arrival_s: float,
    ) -> None:
        self.request, self.handle, self.arrival_s = request, handle, arrival_s
        self.tokens = list(request.prompt)
        self.has_begun = self.is_aborted = False
        self.keyed_pages = 0
        """Pages whose contents the scheduler knows."""
        self.finish: Finish | None = None
        self._end_ids = request.stop_ids | (frozenset() if request.ignores_end else end_ids)
        self._most_tokens = most_tokens
        self._text = TextStream(core, request.prompt)
        self._stops = StopStrings(request.stop)
        self._counts: TokenCounts | None = None
        """What penalties read, once the first token is chosen."""
        self._prompt_scores = list[Score]()
        self._is_prompt_told = not request.scores_prompt

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    def new_keys(self, page_tokens: int) -> tuple[bytes, ...]:
        """Contents of whole pages that the scheduler does not know yet: the ids themselves.

        Equal keys are equal tokens: no digest can take one text for another.
        """
        if self.request.scores_prompt:
            return ()
        known, self.keyed_pages = self.keyed_pages, len(self.tokens) // page_tokens
        new = self.tokens[known * page_tokens : self.keyed_pages * page_tokens]
        ids = np.array(new, dtype="<u4")
        data, width = ids.tobytes(), page_tokens * ids.itemsize
        return tuple(data[at : at + width] for at in range(0, len(data), width))

    @property
    def _may_end(self) -> bool:
        return self.generated >= self.request.least_tokens

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the likeliest, as the model says it."""
        sampling = self.request.sampling
        return not sampling.temperature and not sampling.changes_logits and self._may_end

    def choose(self, logits_V: Tensor) -> int:
        """The next token, by all settings of the request."""
        sampling, prompt = self.request.sampling, self.request.prompt
        if sampling.penalises and self._counts is None:
            answer = self.tokens[len(prompt) :]
            self._counts = TokenCounts(prompt, answer, len(logits_V), logits_V.device)
        if sampling.changes_logits or not self._may_end:
            logits_V = adjust(logits_V, sampling, self._counts)
            if not self._may_end:
                logits_V[list(self._end_ids)] = -torch.inf
        return choose_token(logits_V, sampling, len(self.tokens))

    def take(self, token: int, logits_V: Tensor) -> None:
        """Append a token, and tell the client.

        Args:
            token: Its id.
            logits_V: Those it was chosen from, as the model computed them.
        """
        score = None
        if self.request.top is not None:
            (score,) = score_rows(logits_V[None], [token], self.request.top)
        self.tokens.append(token)
        if self._counts is not None:
            self._counts.add(token)
        finish: Finish | None = None
        part = ""
        if token in self._end_ids:
            finish = "stop"
        else:
            part = self._text.push(token)
        if self.generated == self._most_tokens and finish is None:
            finish = "length"
        if finish is not None:
            part += self._text.finish()
        if self.request.stop and self.generated > self.request.least_tokens:
            part = self._stops.push(part)
            if self._stops.has_stopped:
                finish = "stop"
            elif finish is not None:
                part += self._stops.finish()
        self._tell(TokenEvent(token, part, score, finish))

    def score_prompt(self, start: int, logits_RV: Tensor) -> None:
        """Score tokens of the prompt, in order.

        Args:
            start: Position of the first row's token; a row scores the token after its own.
            logits_RV: Rows of logits.
        """
        known = len(self._prompt_scores) + 1
        targets = self.request.prompt[known : start + 1 + len(logits_RV)]
        first = known - 1 - start
        rows_RV = logits_RV[first : first + len(targets)]
        top = self.request.top or 0
        self._prompt_scores += score_rows(rows_RV, targets, top) if targets else []
        is_whole = len(self._prompt_scores) + 1 == len(self.request.prompt)
        if is_whole and not self._is_prompt_told:
            self._is_prompt_told = True
            self._tell(PromptScored(tuple(self._prompt_scores)))
            if not self._most_tokens:
                self._tell(TokenEvent(finish="length"))

    def embed(self, vector: tuple[float, ...]) -> None:
        """The prompt's embedding is known, which is all that was asked for."""
        self._tell(PromptEmbedded(vector))
        self._tell(TokenEvent(finish="stop"))

    def give_up(self, finish: Finish, error: str = "", retry_after_s: float | None = None) -> None:
        """End without a further token."""
        if self.finish is None:
            text = self._stops.finish()
            self._tell(
                TokenEvent(text=text, finish=finish, error=error, retry_after_s=retry_after_s)
            )

    def _tell(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.finish = event.finish
        try:
            self.handle.deliver(event)
        except Exception:  # whoever took the events is gone
            self.finish = self.finish or "abort"


def score_rows(logits_RV: Tensor, tokens: Sequence[int], top: int) -> list[Score]:
    """Scores of a token in each row.

    Args:
        logits_RV: Rows of logits.
        tokens: A token for each.
        top: Likeliest tokens to score beside it.
    """
    shares_RV = log_probabilities(logits_RV)
    at = torch.tensor(tokens, device=shares_RV.device)[:, None]
    own = shares_RV.gather(1, at).squeeze(1).tolist()
    best = torch.topk(shares_RV, min(top, shares_RV.shape[1]), dim=1)
    rows = zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        Score(token, share, tuple(zip(ids, values, strict=True)))
        for token, share, ids, values in rows
    ]
