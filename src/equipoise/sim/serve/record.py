"""What happened to each request of a simulated trace, and to each replica."""

from dataclasses import dataclass, field

from equipoise.spec.request_trace import TracedRequest


@dataclass(slots=True)
class RequestRecord:
    """One request, as its sender would time it."""

    id: str
    traced: TracedRequest
    replica: int
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
    prompt_tokens: int = 0
    """Prompt tokens that were computed, again after a preemption, too."""
    output_tokens: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    """Tokens that came from the cache."""
    most_pages: int = 0
    """Most pages that requests held at the same time."""
    pages: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Times between two tokens of a request [s], each with how often it occurred."""
