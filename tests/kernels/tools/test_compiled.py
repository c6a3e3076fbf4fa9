"""What the compiler makes of the tuned configurations of all kernels but decode, for GPUs that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
from irminsul_kernels.attention import expanded, extend
from irminsul_kernels.ops import activation, norm, sampling
from irminsul_kernels.tools.aot import inspect, table

SAMPLED = ("extend, 16 heads, 512 + 64, bf16", "expanded, 16 heads, 128 + 64 and 128, bf16")
TUNED = {
    80: SAMPLED,
    90: (*SAMPLED, "extend, merge", "expanded, rows", "RMSNorm of 2048", "write rows", "SiLU", "sampling"),
    100: SAMPLED,
}
"""What is compiled here: each kernel, and on other architectures than sm_90 only those that could spill;
`python -m irminsul_kernels.tools.aot` compiles every configuration."""
ROTATION = "extend, 16 heads, 512 + 64, bf16, tiles of 128"
"""The configuration whose rotation is priced: it is compiled without rotation as well."""


@pytest.mark.parametrize("arch", TUNED)
def test_nothing_spills_and_everything_fits(arch: int) -> None:
    """`pytest -s` shows the table."""
    configs = [c for m in (extend, expanded, norm, activation, sampling) for c in m.aot_configs(arch)]
    chosen = {c.name: c for c in configs if c.name.startswith(TUNED[arch])}
    assert len(chosen) >= len(TUNED[arch])
    reports = [inspect(c if name == ROTATION else replace(c, unrotated={}), arch) for name, c in chosen.items()]
    print("\n" + table(reports))
    for report in reports:
        assert report.spills == 0 and report.stack == 0, report
        assert report.shared <= report.shared_limit, report
        if report.matrix_products:
            assert report.wide_copies >= 16, report
        if report.name == ROTATION:
            # no load per row beyond slot and base position, which come by asynchronous copies
            assert report.rotation_cost_most is not None and report.rotation_cost_most <= 0.12, report
            assert report.global_loads_most == 0, report
    assert (ROTATION in chosen) == (arch == 90)
