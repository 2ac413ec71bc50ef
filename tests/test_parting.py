"""What threads of a warp reach apart, in PTX written for it and in kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import offline
from tests import parting

BARRIER, SHUFFLE = "bar.sync 1, 128;", "shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;"


def kernel(*statements: str) -> list[str]:
    """Returns what is reached apart in a kernel of these statements."""
    text = "\n".join(("mov.u32 %r1, %tid.x;", *statements, "ret;"))
    return parting.apart(f".visible .entry kernel(\n)\n{{\n.reg .b32 %r<20>;\n{text}\n}}\n")


def branch(condition: str, *inside: str) -> tuple[str, ...]:
    """Statements of a branch over others."""
    return condition, "@%p1 bra $L1;", *inside, "$L1:"


FIRST_HALF = "setp.lt.u32 %p1, %r2, 16;"
PARTED = ("and.b32 %r2, %r1, 127;", FIRST_HALF)


def test_a_barrier_in_a_branch_of_half_a_warp_is_noticed() -> None:
    assert kernel(PARTED[0], *branch(FIRST_HALF, BARRIER)) == [BARRIER[:-1]]
    assert kernel(PARTED[0], *branch(FIRST_HALF, "add.s32 %r3, %r1, 1;"), BARRIER) == []


@pytest.mark.parametrize(
    "condition",
    [
        "shr.u32 %r2, %r1, 5; setp.eq.b32 %p1, %r2, 0;",
        "and.b32 %r2, %r1, -32; setp.eq.b32 %p1, %r2, 64;",
        "and.b32 %r2, %r1, 127; setp.lt.u32 %p1, %r2, 32;",
        "and.b32 %r2, %r1, 127; setp.gt.u32 %p1, %r2, 31;",
        "shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; setp.eq.b32 %p1, %r2, 0;",
        "mov.u32 %r2, %ctaid.x; setp.eq.b32 %p1, %r2, 0;",
        "ld.global.b32 %r2, [%rd1]; setp.eq.b32 %p1, %r2, 0;",
    ],
)
def test_whole_warps_may_take_a_branch(condition: str) -> None:
    assert kernel(*branch(condition, BARRIER, SHUFFLE)) == []


@pytest.mark.parametrize(
    "condition",
    [
        "shr.u32 %r2, %r1, 4; setp.eq.b32 %p1, %r2, 0;",
        "and.b32 %r2, %r1, 3; setp.eq.b32 %p1, %r2, 0;",
        "and.b32 %r2, %r1, 127; setp.lt.u32 %p1, %r2, 48;",
        "setp.eq.b32 %p1, %r1, 0;",
        "elect.sync %r2|%p1, -1;",
        "mul.wide.u32 %rd1, %r1, 4; ld.shared.b32 %r2, [%rd1]; setp.eq.b32 %p1, %r2, 0;",
        "atom.global.add.u32 %r2, [%rd1], 1; setp.eq.b32 %p1, %r2, 0;",
    ],
)
def test_threads_of_a_warp_may_not(condition: str) -> None:
    assert kernel(*branch(condition, SHUFFLE)) == [SHUFFLE[:-1]]


def test_a_loop_of_each_threads_own_length_is_noticed() -> None:
    loop = ("mov.b32 %r3, 0;", "$L2:", SHUFFLE, "add.s32 %r3, %r3, 1;")
    assert kernel(*loop, "setp.lt.u32 %p1, %r3, %r1;", "@%p1 bra $L2;") == [SHUFFLE[:-1]]
    assert kernel(*loop, "setp.lt.u32 %p1, %r3, 8;", "@%p1 bra $L2;") == []


def test_what_a_thread_assigns_in_a_branch_is_its_own() -> None:
    assigned = branch(FIRST_HALF, "mov.b32 %r4, 1;")
    again = ("setp.eq.b32 %p2, %r4, 1;", "@%p2 bra $L2;", BARRIER, "$L2:")
    assert kernel("mov.b32 %r4, 0;", PARTED[0], *assigned, *again) == [BARRIER[:-1]]


def test_inline_ptx_has_names_of_its_own() -> None:
    wait = "{ .reg .pred p; WAIT: mbarrier.try_wait.shared.b64 p, [%r5], 0; @!p bra WAIT; }"
    own = "{ .reg .pred p; setp.eq.b32 p, %r1, 0; @p bra OVER; nanosleep.u32 1; OVER: }"
    assert kernel(wait, own, wait, BARRIER) == []


@pytest.mark.skipif(bool(offline.missing_packages()), reason="needs the extra aot")
@pytest.mark.parametrize("all_wait", [True, False])
def test_a_kernel_is_read(all_wait: bool) -> None:
    shape = jax.ShapeDtypeStruct((128,), jnp.float32)

    @functools.partial(plgpu.kernel, out_type=shape)
    def copied(source: jax.Array, target: jax.Array) -> None:
        @plgpu.inline_mgpu()
        def wait(_: object) -> None:
            one = "" if all_wait else " setp.lt.u32 off, thread, 5; @off bra DONE;"
            text = f"mov.u32 thread, %tid.x;{one} bar.sync 3, 128; DONE:"
            utils.inline_ptx(
                f"{{ .reg .b32 thread; .reg .pred off; {text} }}", has_side_effects=True
            )

        wait()
        target[...] = source[...]

    (report,) = offline.compile_reports(copied, shape, target="h200")
    assert parting.apart(report.ptx) == ([] if all_wait else ["bar.sync 3, 128"])
