"""What each request is predicted to take, and what it was charged for."""

from equipoise.schedule.batching.estimates import OutputEstimates
from equipoise.schedule.batching.fair.policy import FairPolicy
from equipoise.schedule.batching.sequence import Sequence
from equipoise.schedule.batching.settings import ServingPrice


class Accounts:
    """Predicted work of the requests that are here."""

    def __init__(self, price: ServingPrice, policy: FairPolicy) -> None:
        self.backlog_s = 0.0
        """Work of all of them that is not done yet [s]."""
        self._price = price
        self._policy = policy
        self._estimates = OutputEstimates()
        self._open = 0

    def open(self, sequence: Sequence, cached_tokens: int) -> None:
        """Estimate what a request takes that finds, or brings, this many computed tokens."""
        request = sequence.request
        left_s = self._price.prompt_s(cached_tokens, request.prompt_tokens - cached_tokens)
        expected = self._estimates.expect(request)
        if expected > 1:  # the first one comes with the prompt
            left_s += self._price.output_s(request.prompt_tokens, expected - 1)
        sequence.left_s = left_s
        self.backlog_s += left_s
        self._open += 1

    def settle(self, sequence: Sequence) -> None:
        """Charge what was computed for the first time since the last settlement."""
        start, stop = sequence.charged, sequence.computed
        if stop <= start:
            return
        request, price = sequence.request, self._price
        prompt = request.prompt_tokens
        if start >= prompt:
            work_s = price.output_s(start, stop - start)
        elif stop <= prompt:
            work_s = price.prompt_s(start, stop - start)
        else:
            work_s = price.prompt_s(start, prompt - start) + price.output_s(prompt, stop - prompt)
        sequence.charged = stop
        self._policy.charge(request.id, work_s)
        left_s = sequence.left_s
        if left_s > 0.0:
            sequence.left_s = after_s = left_s - work_s if work_s < left_s else 0.0
            self.backlog_s -= left_s - after_s

    def prompt_ahead_s(self, sequence: Sequence) -> float:
        """Work of a request's prompt that is not charged yet [s]."""
        left = sequence.request.prompt_tokens - sequence.charged
        return self._price.prompt_s(sequence.charged, left) if left > 0 else 0.0

    def close(self, sequence: Sequence) -> None:
        """A request is gone."""
        self._open -= 1
        # Sums of many small numbers would leave a remainder when nobody is left.
        self.backlog_s = self.backlog_s - sequence.left_s if self._open else 0.0

    def note(self, sequence: Sequence) -> None:
        """A request ended by itself: what it generated is a hint to what its tenant's next will."""
        self._estimates.note(sequence.request.tenant, sequence.generated)
