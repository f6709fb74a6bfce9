"""What happened to each request of a simulated trace, and to each replica."""

from dataclasses import dataclass, field

from equipoise.schedule.batching.iteration import Iteration
from equipoise.spec.request_trace import TracedRequest


@dataclass(slots=True)
class RequestRecord:
    """One request, as its sender would time it."""

    id: str
    traced: TracedRequest
    replica: int
    """Which computed its prompt."""
    here_tokens: int
    """Tokens that this replica generates: all, or the first one."""
    first_s: float = -1.0
    """When its first token came; when its prompt was done, if it generates none."""
    end_s: float = -1.0

    @property
    def ttft_s(self) -> float:
        """Time to first token [s]."""
        return self.first_s - self.traced.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first [s]; None for fewer than two tokens."""
        later = self.traced.output_tokens - 1
        return (self.end_s - self.first_s) / later if later > 0 else None

    @property
    def latency_s(self) -> float:
        """From arrival to the last token [s]."""
        return self.end_s - self.traced.arrival_s


@dataclass(slots=True)
class ReplicaRecord:
    """One replica's counts."""

    iterations: int = 0
    busy_s: float = 0.0
    """Time that its devices compute, the mean over stages of a pipeline."""
    prompt_tokens: int = 0
    """Prompt tokens that were computed, again after a preemption, too."""
    output_tokens: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    """Tokens that came from the cache."""
    most_pages: int = 0
    """Most pages that requests held at the same time."""
    pages: int = 0
    """Pages of all its batches in flight."""
    pairs: int = 0
    """Query-key pairs of all iterations."""
    kv_tokens: int = 0
    """Rows of keys and values that all iterations read."""
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Times between two tokens of a request [s], each with how often it occurred."""

    def count(self, iteration: Iteration, ran: int) -> None:
        """An iteration has run, ``ran`` times: after the first it only decodes."""
        work = iteration.work
        grown = work.sequences * (ran * (ran - 1) // 2)
        self.iterations += ran
        self.output_tokens += ran * iteration.decodes
        self.pairs += ran * work.pairs + grown
        self.kv_tokens += ran * work.kv_tokens + grown
        for chunk in iteration.prefills:
            self.prompt_tokens += chunk.tokens
