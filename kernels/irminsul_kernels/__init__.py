"""MLA attention over position-independent rows. Knows nothing of any engine.

>>> layout = build_layout([slots], base, [q_positions], turns_per_position(inv_freq))
>>> out = mla_attention(q_nope, q_rope, rows, layout, w_uk, w_uv, scale)
"""

from irminsul_kernels.mla_attention import AttentionLayout, build_layout, expanded_threshold, mla_attention
from irminsul_kernels.rotation import cos_sin, rotate, turns_per_position

__all__ = [
    "AttentionLayout",
    "build_layout",
    "cos_sin",
    "expanded_threshold",
    "mla_attention",
    "rotate",
    "turns_per_position",
]
