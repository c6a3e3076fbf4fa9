"""What the compiler makes of the kernels for GPUs that are not here, and the reading of its output."""

from __future__ import annotations

from dataclasses import replace

import pytest
from irminsul_kernels.launch import KernelConfig
from irminsul_kernels.tools.aot import ARCHITECTURES, all_configs, compile_config, inspect, main, table
from irminsul_kernels.tools.sass import disassemble, main_loop

SAMPLED = "decode, 16 heads, 512 + 64, bf16"
"""The configuration that is compiled for the other architectures; `python -m irminsul_kernels.tools.aot` shows all."""


def compiled(kernel: str, arch: int) -> list[KernelConfig]:
    configs = all_configs(arch, kernel)
    return configs if arch == 90 else [replace(c, unrotated={}) for c in configs if c.name == SAMPLED]


class TestDecode:
    """The bars that hold without a GPU. The reports are printed: `pytest -s` shows the table."""

    @pytest.mark.parametrize("arch", ARCHITECTURES)
    def test_every_configuration(self, arch: int) -> None:
        reports = [inspect(config, arch) for config in compiled("decode", arch)]
        print("\n" + table(reports))
        assert reports
        for report in reports:
            assert report.spills == 0 and report.stack == 0, report
            assert report.shared <= report.shared_limit, report
            assert report.rotation_cost is None or report.rotation_cost <= 0.12, report
            if report.matrix_products:
                # nothing but asynchronous copies reads rows in a run; k_r and c_KV go 16 bytes at a time
                assert report.global_loads_least == 0, report
                assert report.wide_copies >= 16, report


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                 /* 0x1 */
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;                /* 0x2 */
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;  /* 0x3 */
        /*0030*/              @!P1 BRA 0x60 ;                             /* 0x4 */
        /*0040*/                   LDG.E R9, desc[UR4][R2.64] ;           /* 0x5 */
        /*0050*/                   FMUL R3, R3, R9 ;                      /* 0x6 */
        /*0060*/                   ISETP.GE.AND P0, PT, R2, R6, PT ;      /* 0x7 */
        /*0070*/               @P2 BRA 0xc0 ;                             /* 0x8 */
        /*0080*/              @!P0 BRA 0x10 ;                             /* 0x9 */
        /*0090*/                   IADD3 R7, R7, 0x1, RZ ;                /* 0xa */
        /*00a0*/               @P3 BRA 0x90 ;                             /* 0xb */
        /*00b0*/                   EXIT ;                                 /* 0xc */
        /*00c0*/                   MUFU.SIN R3, R3 ;                      /* 0xd */
        /*00d0*/                   BRA 0x80 ;                             /* 0xe */
        /*00e0*/                   BRA 0xe0 ;                             /* 0xf */
"""


class TestDisassembly:
    def test_ways_through_the_loop_with_matrix_products(self) -> None:
        """A skipped part, a part out of line after the end, another loop without products, the end's own loop."""
        least, most = main_loop(disassemble(SASS))
        assert [hex(i.address) for i in least] == ["0x10", "0x20", "0x30", "0x60", "0x70", "0x80"]
        assert [i.opcode for i in most if i not in least] == ["LDG.E", "FMUL", "MUFU.SIN", "BRA"]

    def test_no_loop(self) -> None:
        assert main_loop(disassemble("/*0000*/ MOV R1, R2 ;\n/*0010*/ EXIT ;")) == ([], [])


class TestErrors:
    def test_unknown_architecture(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(ValueError, match="arch 75: known are 80"):
            inspect(all_configs(90, "decode")[0], 75)
        with pytest.raises(SystemExit):
            main(["--arch", "75"])
        assert "--arch 75: known are" in capsys.readouterr().err

    def test_unknown_kernel(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["--kernel", "encode"])
        assert "no kernel file of that name" in capsys.readouterr().err

    def test_argument_without_type(self) -> None:
        config = all_configs(90, "decode")[0]
        with pytest.raises(ValueError, match="no type or value for scale"):
            compile_config(replace(config, signature={k: v for k, v in config.signature.items() if k != "scale"}), 90)
