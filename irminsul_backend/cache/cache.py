"""The position-independent cache: admits sequences, allocates slots, keeps finished sequences as donors, evicts."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from irminsul_backend.cache.cached_sequence import MAX_GENERATION, CachedSequence
from irminsul_backend.cache.integrity import IntegrityPass, check_rows
from irminsul_backend.cache.interfaces import Index, Pool, ReusePolicy, Tier
from irminsul_backend.cache.planner import Segment, plan
from irminsul_backend.cache.registry import Registry
from irminsul_backend.cache.slots import NO_SLOTS, SlotPool
from irminsul_backend.cache.tier import NoTier
from irminsul_backend.chunking import Preset, cut, fingerprint
from irminsul_backend.errors import CapacityError

METADATA_FACTOR = 4
"""Limit of the tokens of all idle donors (10 bytes of metadata each), as a multiple of the pool's capacity. They can
exceed the capacity because donors that share rows share slots."""
HEADROOM, MOST_GROWTH = 32, 256
"""Slots taken at admission beyond the prompt, and the most taken at once later: a quarter of the answer so far, at
least the headroom. Runs of slots stay long, because attention on the CPU reads a run as a view; what a sequence holds
in advance stays small, whatever its `max_tokens`."""


class Admission(NamedTuple):
    sequence: CachedSequence
    segments: list[Segment]
    holes: np.ndarray
    """int64 [holes], positions of the prompt to compute, ascending; the last token is always among them."""


class PICache:
    """The KV cache: slots, index and donors. All methods are called from one thread (the engine's), except `stats`.

    A sequence is *running* from :meth:`admit` to :meth:`retire`, :meth:`preempt` or :meth:`discard`, then *idle* (a
    donor that may be evicted). Only sequences hold slots, running or idle: one reference per entry that names the slot.

    A running sequence takes slots as its tokens come, so several of them can want more than the pool has. Progress is
    certain all the same: idle donors can always be evicted, and admission refuses what is larger than the pool. So a
    sequence that runs alone always gets its slots, and an engine that preempts others until :meth:`reserve` succeeds
    for the oldest one ends them all, one after the other at worst.
    """

    def __init__(self, capacity: int, preset: Preset, tier: Tier | None = None) -> None:
        """capacity: number of slots in the pool. tier: takes evicted donors; by default they are dropped."""
        self.pool: Pool = SlotPool(capacity)
        self.registry: Index = Registry(preset.s1_window)
        self._tier = tier or NoTier()
        self._preset = preset
        self._running: set[CachedSequence] = set()
        self._idle: OrderedDict[CachedSequence, None] = OrderedDict()  # least recently used first
        self._idle_tokens = 0
        self._num_evicted = 0
        self._last_of_session: dict[tuple[str, str], CachedSequence] = {}
        self._of_namespace: dict[str, set[CachedSequence]] = {}
        self._pass = IntegrityPass(self.pool, self.registry)

    def check_fits(self, prompt_tokens: int, max_new: int) -> None:
        """Raise CapacityError if a prompt and `max_new` further tokens exceed the pool: they could never finish."""
        size = prompt_tokens + max_new
        if size > self.pool.capacity:
            raise CapacityError(
                f"prompt of {prompt_tokens} tokens + {max_new} to generate = {size} exceeds the KV pool of "
                f"{self.pool.capacity} slots; shorten the prompt, lower max_tokens or raise capacity_tokens"
            )

    def admit(
        self,
        token_ids: np.ndarray,
        chunk_ends: np.ndarray,
        fingerprints: np.ndarray,
        *,
        namespace: str,
        session_id: str,
        policy: ReusePolicy,
        max_new: int,
    ) -> Admission | None:
        """Plan a prompt, take slots for it and some headroom; :meth:`reserve` takes those of the `max_new` tokens.

        Returns None, and evicts nothing, if evicting every idle donor would not be enough: try again when a request
        has ended.

        Raises:
            CapacityError: prompt and `max_new` need more slots than the pool has.
        """
        self.check_fits(len(token_ids), max_new)
        known = self._last_of_session.get((namespace, session_id))
        segments = plan(
            self.registry,
            namespace,
            token_ids,
            chunk_ends,
            fingerprints,
            policy=policy,
            extension=self._preset.extension,
            min_segment=self._preset.min_segment,
            gram=self._preset.gram,
            also_try=[known] if known else [],
        )
        for s in segments:
            assert self.is_cached(s.donor) and s.donor.namespace == namespace, "the index proposed a donor that is gone"
        n = len(token_ids)
        room = np.empty(n + max_new, np.int32)
        generation = np.zeros(n + max_new, np.int16)
        size = n + min(max_new, HEADROOM)
        holes = self._take_slots(segments, room[:size], generation[:size])
        if holes is None:
            return None
        ids = np.empty(n + max_new, np.int32)
        ids[:n] = token_ids
        sequence = CachedSequence(
            namespace, session_id, ids, room, generation, chunk_ends, fingerprints, gram=self._preset.gram
        )
        sequence.slots = room[:size]
        self._running.add(sequence)
        self._of_namespace.setdefault(namespace, set()).add(sequence)
        self._pass.added(sequence)
        holes = holes[: np.searchsorted(holes, n)]
        self.advance(sequence, int(holes[0]))
        self._drop_superseded(segments)
        return Admission(sequence, segments, holes)

    def _take_slots(self, segments: list[Segment], slots: np.ndarray, generation: np.ndarray) -> np.ndarray | None:
        """Fill in the slots and generations of a new sequence: shared in the segments, fresh elsewhere.

        Returns the positions of the fresh ones, int64 ascending; None, with nothing shared, if there are too few.
        """
        computed = np.ones(len(slots), bool)
        for s in segments:
            source = slice(s.donor_start, s.donor_start + s.end - s.start)
            slots[s.start : s.end] = s.donor.slots[source]
            if s.exact:
                generation[s.start : s.end] = s.donor.generation[source]
            else:  # saturating: a wrapped one would pass for exact
                former = self.pool.generation[s.donor.slots[source]]
                generation[s.start : s.end] = np.minimum(former, MAX_GENERATION - 1) + 1
            computed[s.start : s.end] = False
            self._touch(s.donor)
        reused = slots[~computed]
        self.pool.share(reused)  # from here on evicting a donor cannot take these rows away
        fresh = self._allocate(int(computed.sum()), reused)
        if fresh is None:
            self.pool.release(reused)
            return None
        slots[computed] = fresh
        positions = np.flatnonzero(computed)
        generation[computed] = np.maximum.accumulate(generation)[computed]
        self.pool.base[fresh] = positions
        self.pool.generation[fresh] = generation[computed]
        return positions

    def reserve(self, sequence: CachedSequence, n: int = 1) -> bool:
        """Make sure that a running sequence has slots for `n` rows after the written ones; idle donors make way.

        False, with nothing changed, if evicting them all would not be enough: preempt a sequence and try again.
        """
        size, needed = len(sequence.slots), sequence.length + n
        if needed <= size:
            return True
        assert needed <= len(sequence.room), f"a sequence was admitted for {len(sequence.room)} tokens, not {needed}"
        growth = max(HEADROOM, min(MOST_GROWTH, (size - sequence.prompt_length) // 4), needed - size)
        fresh = self._allocate(min(growth, len(sequence.room) - size))
        if fresh is None:
            fresh = self._allocate(needed - size)
        if fresh is None:
            return False
        end = size + len(fresh)
        generation = sequence.generation[size - 1]  # a computed row, so the highest so far
        self.pool.base[fresh] = np.arange(size, end)
        self.pool.generation[fresh] = sequence.generation[size:end] = generation
        sequence.room[size:end] = fresh
        sequence.slots = sequence.room[:end]
        self._pass.grown(sequence, size)
        return True

    def advance(self, sequence: CachedSequence, length: int) -> None:
        """Record that rows [0, length) are written. Others may reuse a prompt's at once, an output's once retired."""
        is_prompt = sequence.length < sequence.prompt_length
        sequence.length = length
        if is_prompt and sequence.leaves_donor:
            self.registry.publish(sequence)

    def append(self, sequence: CachedSequence, token_id: int) -> None:
        """Append a generated token, to be computed next; :meth:`reserve` has taken its slot."""
        assert sequence.length < len(sequence.slots), "a token was appended without a slot; reserve it first"
        sequence.token_ids[sequence.length] = token_id

    def retire(self, sequence: CachedSequence) -> None:
        """End a sequence: chunk its output, keep [0, sequence.length) as an idle donor, release the other slots."""
        length = sequence.length
        if length == 0 or not sequence.leaves_donor:
            self.discard(sequence)
            return
        self._running.remove(sequence)
        self._pass.shrinking(sequence, length)
        self.pool.release(sequence.slots[length:])
        sequence.token_ids = sequence.token_ids[:length].copy()
        sequence.slots = sequence.room = sequence.slots[:length].copy()
        sequence.generation = sequence.generation[:length].copy()
        sequence.chunk_ends, sequence.fingerprints = self._cut_written(sequence)
        self.registry.publish(sequence)
        sequence.running = False
        self._idle[sequence] = None
        self._idle_tokens += length
        self._last_of_session[sequence.namespace, sequence.session_id] = sequence
        while self._idle_tokens > METADATA_FACTOR * self.pool.capacity:
            self._evict(next(iter(self._idle)))

    def preempt(self, sequence: CachedSequence) -> None:
        """Take a running sequence's slots back; to go on, admit its prompt and answer so far as one prompt.

        Its written rows stay as a donor, the most recently used one: it is certain to be asked for again, other donors
        only may be. So they go first, and if this one lasts, going on computes one token.
        """
        self.retire(sequence)

    def _cut_written(self, sequence: CachedSequence) -> tuple[np.ndarray, np.ndarray]:
        """Return chunk ends and fingerprints of [0, length): those of the prompt unchanged, those of the output new."""
        n, length, gram = sequence.prompt_length, sequence.length, self._preset.gram
        written = sequence.chunk_ends <= length
        ends, prints = sequence.chunk_ends[written], sequence.fingerprints[written]
        if length <= n:
            return ends, prints
        answer_ends = n + cut(sequence.token_ids[n:length], self._preset)
        start = max(0, n - gram) if gram else n  # a gram may begin in the prompt
        answer = fingerprint(sequence.token_ids[start:length], answer_ends - start, sequence.namespace, gram)
        return np.concatenate((ends, answer_ends)).astype(np.int32), np.concatenate((prints, answer))

    def discard(self, sequence: CachedSequence) -> int:
        """Remove a sequence, running or idle, and release its slots; returns how many slots became free."""
        if sequence.running:
            self._running.remove(sequence)
        else:
            del self._idle[sequence]
            self._idle_tokens -= sequence.length
        self.registry.forget(sequence)
        namespace = self._of_namespace[sequence.namespace]
        namespace.remove(sequence)
        if not namespace:
            del self._of_namespace[sequence.namespace]
        key = (sequence.namespace, sequence.session_id)
        if self._last_of_session.get(key) is sequence:
            del self._last_of_session[key]
        self._pass.shrinking(sequence, 0)
        sequence.alive = False
        return self.pool.release(sequence.slots)

    def is_cached(self, sequence: CachedSequence) -> bool:
        """Whether the sequence is still in the cache, running or idle."""
        return sequence in self._idle or sequence in self._running

    def clear(self) -> None:
        """Discard every idle donor."""
        for sequence in list(self._idle):
            self.discard(sequence)

    def forget_namespace(self, namespace: str) -> None:
        """Discard the idle donors of a namespace. Its running sequences go on, but nobody finds their rows any more."""
        for sequence in list(self._of_namespace.get(namespace, ())):
            if sequence.running:
                sequence.leaves_donor = False
                self.registry.forget(sequence)
            else:
                self.discard(sequence)

    def _evict(self, donor: CachedSequence) -> None:
        self._tier.store(donor)
        self.discard(donor)
        self._num_evicted += 1

    def _touch(self, donor: CachedSequence) -> None:
        if donor in self._idle:
            self._idle.move_to_end(donor)

    def _drop_superseded(self, segments: list[Segment]) -> None:
        """Discard the idle donor of the exact prefix if the new sequence contains it whole, and so can replace it."""
        if segments and segments[0].exact:
            donor = segments[0].donor
            if donor in self._idle and segments[0].end == donor.length:
                self.discard(donor)

    def _allocate(self, n: int, reused: np.ndarray = NO_SLOTS) -> np.ndarray | None:
        """Allocate n slots, evicting idle donors where too few are free.

        None, with nothing evicted, if too few would be free without any idle donor, as long as `reused` are held.
        """
        slots = self.pool.allocate(n)
        if slots is not None or n > self._most_free(n, reused):
            return slots
        # First donors with rows of their own, least recently used first; then the rest, whose rows are all shared.
        for require_own in (True, False):
            for donor in list(self._idle):
                if not require_own or (self.pool.refs[donor.slots] == 1).any():
                    self._evict(donor)
                    if self.pool.num_free >= n:
                        return self.pool.allocate(n)
        return None

    def _most_free(self, enough: int, reused: np.ndarray) -> int:
        """Number of slots that only idle donors hold, or that are free; if `enough`, perhaps fewer than there are."""
        held = [reused, *(s.slots for s in self._running)]
        at_least = self.pool.capacity - sum(len(slots) for slots in held)
        if at_least >= enough:
            return at_least
        in_use = np.zeros(self.pool.capacity, bool)
        for slots in held:
            in_use[slots] = True
        return self.pool.capacity - int(np.count_nonzero(in_use))

    def stats(self) -> dict[str, Any]:
        """Return the numbers of slots, sequences and index entries, for the engine's status."""
        return {
            "capacity": self.pool.capacity,
            "free": self.pool.num_free,
            "used": self.pool.capacity - self.pool.num_free,
            "running": len(self._running),
            "idle": len(self._idle),
            "idle_tokens": self._idle_tokens,
            "evictions": self._num_evicted,
            "registry_entries": len(self.registry),
        }

    def check_some(self) -> bool:
        """Check a part of what :meth:`check_integrity` does, in about a millisecond, from where the last call ended.

        Returns whether this call ended a pass over everything. Raises AssertionError at a contradiction.
        """
        return self._pass.step(itertools.chain(self._running, self._idle))

    def check_integrity(self) -> None:
        """Raise AssertionError if reference counts, free count, registry or generations contradict the sequences."""
        live = [*self._running, *self._idle]
        held = np.concatenate([s.slots for s in live]) if live else np.empty(0, np.int32)
        counts = np.bincount(held, minlength=self.pool.capacity)
        assert np.array_equal(counts, self.pool.refs), "a slot's reference count differs from its holders"
        self.pool.check_free()
        assert self._idle_tokens == sum(s.length for s in self._idle), "idle tokens were miscounted"
        for s in live:
            check_rows(self.pool, s, 0, s.length)
            self.registry.check(s, 0, len(s.slots))
        alive = set(live)
        assert len(self.registry) == sum(1 for _ in self.registry.entries()), "the index miscounted its entries"
        for namespace, donor, position in self.registry.entries():
            assert donor in alive, "the registry names a sequence that is gone"
            assert donor.namespace == namespace, "a row crossed a namespace"
            assert position < donor.length, "the registry names rows that are not written"
        for (namespace, _), sequence in self._last_of_session.items():
            assert sequence in alive and sequence.namespace == namespace, "a session remembers a sequence that is gone"
