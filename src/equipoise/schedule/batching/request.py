"""Requests as the scheduler sees them: sizes and names, never a token."""

from dataclasses import dataclass

from equipoise.base.errors import EquipoiseError


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """One prompt to be continued."""

    id: str
    """Unique among the requests that the scheduler holds; breaks ties."""
    tenant: str
    """Who pays. Pages are never shared between tenants."""
    arrival_s: float
    prompt_tokens: int
    most_tokens: int
    """Most tokens to generate; 0 only scores the prompt."""
    page_keys: tuple[bytes, ...] = ()
    """Contents of the prompt's whole pages, page by page: the token ids as bytes, or a digest of
    them. Pages are shared where the contents of all pages up to them are equal. Empty: nothing is
    shared."""
    salt: str = ""
    """Pages are shared only between requests with the same salt, within a tenant."""
    scores_prompt: bool = False
    """Whether logits of every prompt token are needed, so that no page of it can be reused."""
    job: str = ""
    """The job that this request is a stage of; empty: a job of its own."""
    given_tokens: int = 0
    """First tokens of the prompt whose keys and values come with the request, from devices that
    only compute prompts. What a preemption takes of them is computed here."""


class QueueFullError(EquipoiseError):
    """The scheduler takes no further request at the moment; try again after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
