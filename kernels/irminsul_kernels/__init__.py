"""MLA attention over position-independent KV rows. Independent of any engine.

>>> layout = build_layout([slots], base, [q_positions], turns_per_position(inv_freq))
>>> out = mla_attention(q_nope, q_rope, rows, layout, w_uk, w_uv, scale)

On a GPU this runs the Triton kernels, on the CPU torch. Each kernel can be called by itself; these modules, and no
others, need the `triton` package: `decode`, `extend` and `expanded` (attention), `norm` (RMSNorm, new rows into their
slots), `activation` (SiLU gate), `sampling`.
"""

from irminsul_kernels.attention.mla_attention import AttentionLayout, build_layout, expanded_threshold, mla_attention
from irminsul_kernels.ops.rotation import cos_sin, rotate, turns_per_position

__all__ = [
    "AttentionLayout",
    "build_layout",
    "cos_sin",
    "expanded_threshold",
    "mla_attention",
    "rotate",
    "turns_per_position",
]

__version__ = "0.1.0"
