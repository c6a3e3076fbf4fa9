"""Which tokens the next step computes: who waits, who runs, and who gives way."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from irminsul_backend.cache import PICache
from irminsul_backend.chunking import Preset
from irminsul_backend.engine.batch import Piece
from irminsul_backend.engine.fair_queue import FairQueue
from irminsul_backend.engine.running_sequence import RunningSequence
from irminsul_backend.engine.token_budget import PREFILL_SHARE, TokenBudget

MOST_HEADS = 64
"""Sessions among whose first requests one is sought that may pass a long prompt."""


class Scheduler:
    """Holds every request from :meth:`add` to :meth:`remove`, waiting or running. Called on the engine's thread.

    A step decodes one token of every sequence that can, and computes prompts within the token budget, one after the
    other: a request is admitted only when its prefill can begin, so it finds what the requests before it have just
    computed. A prompt short enough for its share of the budget passes a long one that is being computed.

    Whose turn it is, :class:`FairQueue` says. Requests that do not find room wait until something ends, but for two
    cases, in which a running sequence is preempted: it has lower priority; or the request's namespace runs nothing
    while another runs several. When running sequences outgrow the pool, the one of the lowest priority that came last
    gives way. So the oldest one of the highest priority always runs to its end, and then the next is the oldest.
    """

    def __init__(self, cache: PICache, preset: Preset, budget: TokenBudget, max_running: int) -> None:
        self.cache = cache
        self.budget = budget
        self.running: list[RunningSequence] = []
        self.counters: Counter[str] = Counter()
        self.current: RunningSequence | None = None
        """The request on whose behalf something is being done."""
        self._preset = preset
        self._max_running = max_running
        self._waiting: FairQueue[RunningSequence] = FairQueue()
        # Until something ends: who found no room, though it was their turn, and whether all must wait.
        self._blocked: set[RunningSequence] = set()
        self._is_full = False
        self._steps = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: RunningSequence) -> None:
        """Take in a new request; it waits."""
        self._waiting.join(sequence)
        self._wait(sequence)
        namespaces = {s.flow[0] for s in self.running}
        if sequence.flow[0] not in namespaces or any(s.priority < sequence.priority for s in self.running):
            self._reconsider()

    def remove(self, sequence: RunningSequence) -> None:
        """Forget a request, whose rows the cache has taken back."""
        if sequence.is_waiting:
            self._stop_waiting(sequence)
        else:
            self.running.remove(sequence)
        self._waiting.leave(sequence)
        self._reconsider()

    def requeue(self, sequence: RunningSequence) -> None:
        """Let a running sequence wait again, before the others of its session; the cache has taken its rows back."""
        self.running.remove(sequence)
        sequence.admission = None
        self._wait(sequence, front=True)
        self._reconsider()

    def charge(self, sequence: RunningSequence, tokens: int) -> None:
        """Count computed tokens against the share of the request's namespace and session."""
        self._waiting.charge(sequence, tokens)

    def grow(self, sequence: RunningSequence) -> bool:
        """Take a slot for the next token of a running sequence, preempting others if need be.

        False if the sequence had to give way itself.
        """
        while not self.cache.reserve(sequence.cached.sequence):
            if len(self.running) == 1:
                raise RuntimeError("the pool has no slot for the only running sequence")
            victim = max(self.running, key=lambda s: s.rank)
            self._preempt(victim)
            self._is_full = True  # or the next in turn would take what has just become free
            if victim is sequence:
                return False
        return True

    def schedule(self) -> list[tuple[RunningSequence, Piece]]:
        """Return the scheduled sequences, those that decode first, with the tokens that each is to compute."""
        self._steps += 1
        prefilling = [s for s in self.running if s.is_prefilling]
        decoding = [s for s in self.running if not s.is_prefilling]
        most = self.budget.max_decoding(bool(prefilling or len(self._waiting)))
        if len(decoding) > most:
            decoding = sorted(decoding, key=lambda s: s.last_step)[:most]
        for sequence in decoding:
            sequence.last_step = self._steps
        batch = [(s, s.cached, s.next_piece(1)) for s in decoding]
        budget = self.budget.prefill(len(decoding))
        if prefilling and _remaining(prefilling[0]) >= budget:
            prefilling = [*self._admit_short(budget // PREFILL_SHARE), *prefilling]
        while budget > 0:
            if prefilling:
                sequence = prefilling.pop(0)
                if sequence.admission is None:
                    continue
            elif (head := self._next_in_turn()) is None:
                break
            elif self._admit(head):
                sequence = head
            else:
                continue
            piece = sequence.next_piece(budget)
            batch.append((sequence, sequence.cached, piece))
            budget -= len(piece.positions)
        # without those that were preempted meanwhile, whose slots may be another's by now
        return [(sequence, piece) for sequence, admission, piece in batch if sequence.admission is admission]

    def _next_in_turn(self) -> RunningSequence | None:
        """Return who is to run next; None if that one has to wait, so nobody passes it."""
        head = None if self._is_full else next(self._waiting.heads(), None)
        return None if head in self._blocked else head

    def _reconsider(self) -> None:
        """Something has happened that may have made room."""
        self._blocked.clear()
        self._is_full = False

    def _admit_short(self, budget: int) -> list[RunningSequence]:
        """Admit waiting requests whose prompts fit the budget whole."""
        admitted: list[RunningSequence] = []
        for head in list(islice(self._waiting.heads(), MOST_HEADS)):
            if self._blocked or self._is_full or len(self.running) >= self._max_running:
                break
            if len(head.prompt.token_ids) + len(head.sampler.generated) <= budget and self._admit(head):
                admitted.append(head)
                budget -= _remaining(head)
        return admitted

    def _admit(self, sequence: RunningSequence) -> bool:
        """Let a waiting request run; False, and nothing more is admitted for now, if there is no room."""
        self.current = sequence
        if len(self.running) >= self._max_running and not self._make_room(sequence):
            self._blocked.add(sequence)
            return False
        prompt, request = sequence.prompt_to_admit(self._preset), sequence.request
        while True:
            admission = self.cache.admit(
                *prompt,
                namespace=request.namespace,
                session_id=request.session_id,
                policy=sequence.policy,
                max_new=sequence.max_new,
            )
            if admission is not None:
                break
            if not self.running:
                raise RuntimeError("the empty pool has no room for a request that fits it")
            if not self._make_room(sequence):
                self._blocked.add(sequence)
                return False
        self._stop_waiting(sequence)
        self.running.append(sequence)
        if not sequence.has_begun:
            self.charge(sequence, len(admission.holes))
        sequence.admit(admission)
        return True

    def _make_room(self, sequence: RunningSequence) -> bool:
        """Preempt one running sequence that has to give way to a waiting one, if there is any."""
        counts = Counter(s.flow[0] for s in self.running)
        is_first = not counts[sequence.flow[0]]
        victims = [
            s
            for s in self.running
            if s.priority < sequence.priority
            or (is_first and s.priority == sequence.priority and counts[s.flow[0]] > 1)
        ]
        if not victims:
            return False
        self._preempt(max(victims, key=lambda s: (-s.priority, counts[s.flow[0]], s.arrival)))
        return True

    def _preempt(self, sequence: RunningSequence) -> None:
        self.cache.preempt(sequence.cached.sequence)
        self.counters["preemptions"] += 1
        sequence.preemptions += 1
        self.requeue(sequence)

    def _wait(self, sequence: RunningSequence, *, front: bool = False) -> None:
        sequence.is_waiting = True
        self._waiting.push(sequence, front=front)

    def _stop_waiting(self, sequence: RunningSequence) -> None:
        self._waiting.remove(sequence)
        sequence.is_waiting = False


def _remaining(sequence: RunningSequence) -> int:
    """Holes of a running sequence that are still to be computed."""
    return len(sequence.cached.holes) - sequence.num_computed
