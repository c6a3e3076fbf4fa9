"""What an analysis finds, as plain data: made by the replay, printed by the command, drawn by the report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PromptResult:
    """One prompt of a replay: where its tokens came from. exact + content + computed == tokens."""

    session: str
    turn: int
    tokens: int
    exact: int
    """Tokens of the longest prefix seen before in any session, counted token by token."""
    exact_blocks: int
    """The same in whole blocks, as engines with paged caches count it."""
    content: int
    """Reused beyond that prefix."""
    computed: int
    segments: tuple[tuple[int, int, int, bool], ...]
    """(first position, length, δ = position here - position in the donor, part of the exact prefix), in order."""


@dataclass(frozen=True)
class Break:
    """Where a prompt left the most similar prompt before it: the first token that differs."""

    session: str
    turn: int
    position: int
    cause: str
    """A name from ``irminsul_backend.analysis.causes.CAUSES``."""
    lost: int
    """Known tokens after the break that a prefix cache loses."""
    before: str = ""
    """A few tokens of context before the break; empty unless text may be shown."""
    was: str = ""
    now: str = ""


@dataclass(frozen=True)
class Cause:
    """All breaks of one kind in a file."""

    name: str
    prompts: int
    lost: int
    advice: str
    """Empty if nothing was lost."""


@dataclass(frozen=True)
class CapacityPoint:
    """Totals of a replay with eviction in a cache of `capacity` tokens."""

    capacity: int
    exact: int
    content: int
    computed: int


@dataclass
class ReplayResult:
    """One file under one scenario and preset."""

    file: str
    scenario: str
    preset: str
    sessions: int = 0
    prompts: list[PromptResult] = field(default_factory=list)
    bound: int | None = None
    """Tokens beyond the exact prefix that lie in some run of 32 seen before: what no matcher can exceed."""
    breaks: list[Break] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    capacities: list[CapacityPoint] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Lines that were left out, each with file, line number and reason."""
    seconds: float = 0.0
    """CPU time of cutting, matching and registering, without reading and tokenising."""

    @property
    def tokens(self) -> int:
        return sum(p.tokens for p in self.prompts)

    @property
    def exact(self) -> int:
        return sum(p.exact for p in self.prompts)

    @property
    def exact_blocks(self) -> int:
        return sum(p.exact_blocks for p in self.prompts)

    @property
    def content(self) -> int:
        return sum(p.content for p in self.prompts)

    @property
    def computed(self) -> int:
        return sum(p.computed for p in self.prompts)

    @property
    def segments(self) -> int:
        """Reused runs beyond the exact prefixes."""
        return sum(sum(not s[3] for s in p.segments) for p in self.prompts)
