"""Sums that a CTA leaves in global memory for the one that adds them up, wherever that runs."""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.ptx import sums
from pallas_gemm.kernels.ptx.operation import REF, Operation, emit
from pallas_gemm.kernels.ptx.sums import AT_ONCE, LAYOUT, LINE
from pallas_gemm.kernels.ptx.widen import run
from pallas_gemm.kernels.traced import Ref, Values


def _place(left: Any) -> list[Any]:
    """Where the first sums of this thread lie."""
    own = run("{ mov.u32 $0, %tid.x; and.b32 $0, $0, 127; shl.b32 $0, $0, 4; }")
    return [utils.memref_ptr(left), own]


@Operation
def leave(total: Values, left: Ref) -> None:
    """Stores the sums of this warpgroup: [4 registers, thread, register]."""

    @plgpu.inline_mgpu(arg_types=(LAYOUT, REF))
    def inline(_: Any, total: Values, left: Ref) -> None:
        values = sums.values_of(sums.registers_of(total))
        stores = "".join(
            f"st.global.v4.f32 [there+{i // AT_ONCE * LINE}],"
            f" {{${i + 2}, ${i + 3}, ${i + 4}, ${i + 5}}};"
            for i in range(0, len(values), AT_ONCE)
        )
        emit(
            f"{{ .reg .b64 there; cvt.u64.u32 there, $1; add.u64 there, there, $0; {stores} }}",
            [*_place(left), *values],
            ["l", "r", *["f"] * len(values)],
        )

    inline(total, left)


@leave.meaning
def _(total: Values, left: Ref) -> None:
    left[...] = total.reshape(-1)


@Operation
def with_left(total: Values, left: Ref) -> Any:
    """Adds the sums that another CTA has left."""

    @plgpu.inline_mgpu(arg_types=(LAYOUT, REF), return_type=sums.type_of(total))
    def inline(_: Any, total: Values, left: Ref) -> Any:
        registers = sums.registers_of(total)
        count = registers.size
        adds = "".join(
            f"ld.global.v4.f32 {{x0, x1, x2, x3}}, [there+{i // AT_ONCE * LINE}];"
            + "".join(f"add.f32 ${i + j}, ${count + i + j}, x{j};" for j in range(AT_ONCE))
            for i in range(0, count, AT_ONCE)
        )
        text = (
            "{ .reg .b64 there; .reg .f32 x<4>;"
            f" cvt.u64.u32 there, ${2 * count + 1}; add.u64 there, there, ${2 * count}; {adds} }}"
        )
        given = [*sums.values_of(registers), *_place(left)]
        constraints = [*map(str, range(count)), "l", "r"]
        return sums.array_of(sums.added(registers, text, given, constraints))

    return inline(total, left)


@with_left.meaning
def _(total: Values, left: Ref) -> Any:
    return total + left[...].reshape(total.shape)
