"""The requests that hold pages: admitted, advanced, preempted, stopped."""

from equipoise.schedule.batching.accounts import Accounts
from equipoise.schedule.batching.decodes import Decodes
from equipoise.schedule.batching.fair.policy import FairPolicy, Key
from equipoise.schedule.batching.iteration import ServeChunk, Swap
from equipoise.schedule.batching.residency import Residency
from equipoise.schedule.batching.sequence import Sequence
from equipoise.schedule.batching.settings import BatchSettings, ServingPrice
from equipoise.schedule.batching.siblings import Siblings
from equipoise.schedule.batching.turns import TenantTurns

PREEMPTION_MODES = ("swap", "recompute")
"""What becomes of what a preempted request has computed: moved to host memory, or given up."""


class Residents:
    """Sequences that run, and what they share: pages, the decodes' counter, common prompts."""

    def __init__(self, settings: BatchSettings, price: ServingPrice, policy: FairPolicy) -> None:
        self.memory = Residency(settings)
        self.decodes = Decodes(settings.page_tokens)
        self.siblings = Siblings()
        self.accounts = Accounts(price, policy)
        self.running: dict[str, Sequence] = {}
        """Sequences with pages."""
        self.prefilling: dict[str, Sequence] = {}
        """Those of them that do not decode."""
        self.turns = TenantTurns(
            settings,
            price,
            self.decodes,
            self.prefilling,
            divides_by_tenant=policy.divides_by_tenant,
        )
        self.preemptions = dict.fromkeys(PREEMPTION_MODES, 0)
        self.hit_tokens = 0
        """Tokens that came from the cache."""
        self.asked_tokens = 0
        """Tokens that were looked up in it."""
        self._price = price
        self._policy = policy
        self._most_sequences = settings.most_sequences

    def has_place(self) -> bool:
        """Whether one more sequence may run."""
        return len(self.running) < self._most_sequences

    def grow_decodes(self, preempted: list[Sequence]) -> list[Swap]:
        """Settle, cache and grow the decodes that have filled their pages."""
        swaps: list[Swap] = []
        memory, settle = self.memory, self.accounts.settle
        page_tokens, grow = memory.page_tokens, memory.pool.grow
        for sequence in self.decodes.at_page_end():
            if not sequence.is_decoding:  # preempted for one before it
                continue
            settle(sequence)
            if sequence.registered < len(sequence.keys):
                memory.register(sequence)
            while sequence.computed == len(sequence.pages) * page_tokens:
                if grow(sequence.pages):
                    sequence.runs = None
                    break
                victim = max(self.running.values(), key=self._key_of)
                swaps += self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
        return swaps

    def admit(self, sequence: Sequence, swaps_in: list[Swap]) -> bool | None:
        """Give a waiting request pages: True; False if it waits for a sibling, None for pages."""
        memory, name = self.memory, sequence.request.id
        hits = []
        if sequence.slots:
            needed = memory.pages_of(sequence.known)
        elif sequence.keys:
            hits = memory.hits(sequence)
            most = memory.most_hits(sequence)
            leader = self.siblings.leader_of(sequence, hits, most)
            if leader is not None:
                self._policy.take(name, 0.0)
                self.siblings.wait(sequence, leader, most)
                return False
            needed = memory.pages_to_place(sequence, hits)
        else:  # it can have nothing in common with any other
            needed = memory.pages_of(sequence.known)
        # Each of those that run may need a page soon.
        if needed + len(self.running) > memory.pool.available:
            return None
        if sequence.slots:
            swaps_in.append(memory.swap_in(sequence))
        else:
            memory.place(sequence, hits)
            self.asked_tokens += sequence.known
            self.hit_tokens += len(hits) * memory.page_tokens
            sequence.charged = max(sequence.charged, sequence.computed)  # hits are free
        self._policy.take(name, self.accounts.prompt_ahead_s(sequence))
        self.running[name] = sequence
        if sequence.generated and sequence.known == sequence.computed + 1:
            self._decode(sequence)
        else:
            self.prefilling[name] = sequence
            self.siblings.lead(sequence)
        return True

    def advance(self, sequence: Sequence, chunk: ServeChunk) -> None:
        """A sequence's chunk has run."""
        name = sequence.request.id
        sequence.computed += chunk.tokens
        self.accounts.settle(sequence)
        self.memory.register(sequence)
        if chunk.samples:
            sequence.known += 1
            del self.prefilling[name]
            self._decode(sequence)
            self._wake(self.siblings.gone(sequence))
        else:
            self._wake(self.siblings.progress(sequence))

    def _decode(self, sequence: Sequence) -> None:
        self.decodes.join(sequence)
        self.turns.begin(sequence)

    def _preempt(self, sequence: Sequence) -> list[Swap]:
        self.stop(sequence)
        memory, tokens = self.memory, sequence.computed
        swaps = []
        recompute_s = self._price.prompt_s(0, tokens) if tokens else 0.0
        has_slots = memory.pages_of(tokens) <= memory.free_slots
        if tokens and has_slots and 2 * self._price.swap_s(tokens) < recompute_s:
            swaps.append(memory.swap_out(sequence))
        else:
            memory.release(sequence)
        self.preemptions["swap" if swaps else "recompute"] += 1
        self._policy.wait(sequence.request.id)
        return swaps

    def stop(self, sequence: Sequence) -> None:
        """A sequence runs no longer; its pages are still its own."""
        name = sequence.request.id
        if sequence.is_decoding:
            self.decodes.leave(sequence)
        else:
            del self.prefilling[name]
            self._wake(self.siblings.gone(sequence))
        del self.running[name]
        self.accounts.settle(sequence)

    def turn(self, sequence: Sequence) -> Key:
        """A sequence's place in the order: before those that wait for it would have theirs."""
        waiting = self.siblings.waiting_for(sequence)
        return min([self._key_of(sequence), *map(self._key_of, waiting)])

    def _key_of(self, sequence: Sequence) -> Key:
        return self._policy.key(sequence.request.id)

    def _wake(self, sequences: list[Sequence]) -> None:
        for each in sequences:
            self._policy.wait(each.request.id)
