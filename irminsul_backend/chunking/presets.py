"""Named chunking settings: the paper's and ours."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Preset:
    """Parameters of cutting and matching. Lengths are in tokens. Raises ValueError if fields contradict each other."""

    name: str
    window: int
    """Number of ids that the rolling hash depends on; a power of two."""
    shift: int
    """Bits by which the hash is shifted per id; ``window * shift == 64``."""
    mean: int
    """Expected chunk length on text without structure."""
    minimum: int
    maximum: int
    structure_cuts: bool
    """Whether the template's edges are cuts; a marker is one in every preset."""
    extension: bool
    """Whether a match is extended left and right by comparing ids."""
    min_segment: int
    """A reused run shorter than this is computed instead."""
    s1_window: int = 0
    """Length of the windows in which a missed chunk is looked up again (paper, S1); 0 = off."""
    gram: int = 0
    """If not 0, a fingerprint covers the `gram` ids before a cut instead of the whole chunk, so that a match does not
    depend on where the previous cut is."""

    def __post_init__(self) -> None:
        if self.window * self.shift != 64 or self.window & (self.window - 1):
            raise ValueError(f"preset {self.name}: window {self.window} * shift {self.shift} must be 64, window 2^k")
        if not 1 <= self.minimum <= self.mean <= self.maximum or self.maximum < 2 * self.minimum:
            raise ValueError(
                f"preset {self.name}: needs minimum <= mean <= maximum and maximum >= 2 * minimum, "
                f"got {self.minimum}, {self.mean}, {self.maximum}"
            )

    @property
    def threshold(self) -> int:
        """A chunk may end after an id where hash < threshold, in 64 bits.

        A chunk is `minimum` long plus a geometric number of further ids with success rate threshold / 2^64.
        """
        return (1 << 64) // (self.mean - self.minimum + 1)


_PAPER = Preset("paper", 64, 1, 128, 32, 512, structure_cuts=False, extension=False, min_segment=1)

PRESETS = {
    preset.name: preset
    for preset in (
        _PAPER,
        replace(_PAPER, name="paper+s1", s1_window=128),
        replace(_PAPER, name="paper+extension", extension=True, min_segment=32),
        Preset("default", 16, 4, 32, 16, 256, structure_cuts=True, extension=True, min_segment=32),
        Preset("grams", 32, 2, 32, 8, 256, structure_cuts=False, extension=True, min_segment=32, gram=32),
    )
}
