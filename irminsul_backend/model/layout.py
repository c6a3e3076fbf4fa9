"""How a published tensor goes into its place in one of the model's: each function copies (ours, theirs).

The dtype may change on the way. Matrices are [out, in].
"""

from __future__ import annotations

from torch import Tensor


def copy_rows(start: int, ours: Tensor, theirs: Tensor) -> None:
    """Copy [m, n] into rows `start`.. of [M, n]."""
    ours[start : start + theirs.shape[0]].copy_(theirs)


def copy_expert(expert: int, start: int, ours: Tensor, theirs: Tensor) -> None:
    """Copy [m, n] into rows `start`.. of entry `expert` of [E, M, n]."""
    copy_rows(start, ours[expert], theirs)


def copy_rotary(
    start: int, end: int, heads: int, rope_dim: int, interleaved: bool, ours: Tensor, theirs: Tensor
) -> None:
    """Copy [heads * width, n] into rows `start` to `end` of [M, n], rotary rows in the half-split layout.

    The last `rope_dim` rows of a head are rotary: 2i goes to i and 2i + 1 to i + rope_dim / 2. Scores do not change:
    queries and keys are reordered alike.
    """
    columns = theirs.shape[1]
    into, source = ours[start:end].view(heads, -1, columns), theirs.view(heads, -1, columns)
    if not interleaved:
        into.copy_(source)
        return
    plain, half = into.shape[1] - rope_dim, rope_dim // 2
    into[:, :plain].copy_(source[:, :plain])
    into[:, plain : plain + half].copy_(source[:, plain::2])
    into[:, plain + half :].copy_(source[:, plain + 1 :: 2])


def copy_key_half(ours: Tensor, theirs: Tensor) -> None:
    """Copy the key rows of kv_b [H * (dn + dv), R] into w_uk [H, dn, R]."""
    ours.copy_(theirs.view(ours.shape[0], -1, theirs.shape[1])[:, : ours.shape[1]])


def copy_value_half(ours: Tensor, theirs: Tensor) -> None:
    """Copy the value rows of kv_b [H * (dn + dv), R] into w_uv [H, R, dv]."""
    ours.copy_(theirs.view(ours.shape[0], -1, theirs.shape[1])[:, -ours.shape[2] :].transpose(1, 2))
