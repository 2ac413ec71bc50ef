"""What reads a sum too early, in PTX written for it and in kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import offline
from pallas_gemm.kernels.ptx import arrays
from tests import early_reads

WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2}, %rd1, %rd2, 1, 1, 1, 0, 0;"
LAST, ALL = "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 0;"
ADD = "add.f32 %f3, %f2, %f2;"


def early(*statements: str) -> list[str]:
    """Returns what reads a sum too early in a kernel of these statements."""
    text = "\n".join((*statements, "ret;"))
    return early_reads.early(f".visible .entry kernel(\n)\n{{\n.reg .f32 %f<9>;\n{text}\n}}\n")


def test_only_what_follows_the_wait_reads_sums() -> None:
    assert early(WGMMA, ALL, ADD) == []
    assert early(WGMMA, ADD, ALL) == [ADD[:-1]]
    assert early(WGMMA, LAST, ADD, ALL) == [ADD[:-1]]
    assert early(WGMMA, "mul.f32 %f3, %f5, %f5;", ALL) == []


def test_a_copy_of_a_sum_is_one_too() -> None:
    copied = WGMMA, "mov.b32 %f5, %f1;"
    assert early(*copied, "neg.f32 %f6, %f5;", ALL) == ["neg.f32 %f6, %f5"]
    assert early(*copied, ALL, "neg.f32 %f6, %f5;") == []


def test_each_way_to_an_instruction_has_to_wait() -> None:
    either = WGMMA, "@%p1 bra $L1;", ALL, "$L1:", ADD
    assert early(*either) == [ADD[:-1]]
    assert early(*either[:3], "bra $L2;", "$L1:", ALL, "$L2:", ADD) == []


def test_a_loop_reads_what_its_last_round_wrote() -> None:
    assert early("$L1:", ADD, WGMMA, "@%p1 bra $L1;", ALL) == [ADD[:-1]]
    assert early("$L1:", ADD, WGMMA, ALL, "@%p1 bra $L1;") == []


@pytest.mark.parametrize(("k", "precision"), [(96, None), (192, "BF16_BF16_F32_X3")])
@pytest.mark.parametrize(("rows", "keeps_order"), [(64, True), (72, False)])
def test_the_compiler_would_read_sums_early(
    rows: int, keeps_order: bool, k: int, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what keeps it from that, it takes the sign of sums before they are complete."""
    if not keeps_order:
        # A kernel of other sizes is not one that was lowered before.
        monkeypatch.setattr(arrays, "fenced", lambda _, total, __: total)

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        how = {"activation": "sigmoid", "transpose_b": True, "implementation": "hopper"}
        return pallas_gemm.gemm(a, b, precision=precision, **how)

    operands = [jax.ShapeDtypeStruct((x, k), jnp.float32) for x in (rows, 64)]
    with pallas_gemm.target("h200"):
        reports = offline.compile_reports(f, *operands, target="h200")
    (ptx,) = (own.ptx for own in reports if "wgmma" in own.ptx)
    assert bool(early_reads.early(ptx)) != keeps_order
