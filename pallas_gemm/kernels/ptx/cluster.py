"""Sums that CTAs of a cluster hand over, by way of the shared memory of the first."""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.kernels.ptx.operation import NUMBER, Operation, Program
from pallas_gemm.kernels.ptx.widen import Register, run
from pallas_gemm.kernels.traced import Ref, Scalar, Values

LAYOUT = plgpu.Layout.WGMMA
LINE = 4 * WARPGROUP_THREADS
"""Bytes of a register of all threads."""
MEET = Program(
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
    convergent=True,
)


@Operation
def meet() -> None:
    """Waits for all threads of a cluster, and for what they have stored."""
    MEET()


@Operation
def joined(total: Values, apart: Ref, rank: Scalar, me: Scalar, sends: Scalar) -> Any:
    """Adds up the sums of all CTAs of a cluster in the first, when all threads have met.

    Args:
        total: Sums of this warpgroup.
        apart: Where those of the others come to lie: [CTA, consumer, register, thread].
        rank: Which CTA this is.
        me: Which consumer.
        sends: Whether this warpgroup has sums that the first CTA lacks.
    """
    like = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=LAYOUT)
    types = (LAYOUT, plgpu.RefType(), NUMBER, NUMBER, NUMBER)
    others, consumers, count, _ = apart.shape

    @plgpu.inline_mgpu(arg_types=types, return_type=like)
    def inline(_: Any, total: Values, apart: Ref, *numbers: Any) -> Any:
        llvm: Any = utils.llvm
        word = utils.ir.IntegerType.get_signless(32)
        rank, me, sends = (x.registers.item() for x in numbers)
        acc = total.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        zero = utils.c(0, word)
        values = [llvm.extractelement(x, zero) for x in acc.registers.flat]
        base = llvm.ptrtoint(word, utils.memref_ptr(apart))
        # The first CTA keeps the sums of each other one.
        first = run(f"mad.lo.u32 $0, $1, {count * LINE}, $2;", me, base)
        size = consumers * count * LINE
        _send(
            run(f"{{ sub.u32 $0, $1, 1; mad.lo.u32 $0, $0, {size}, $2; }}", rank, first),
            sends,
            values,
        )
        for other in range(others):
            values = _add(run(f"add.u32 $0, $1, {other * size};", first), rank, values)
        registers = acc.registers.copy()
        for i, x in enumerate(values):
            empty = llvm.mlir_undef(acc.registers.flat[i].type)
            registers.flat[i] = llvm.insertelement(empty, x, zero)
        kept = {"_registers": registers, "_layout": acc.layout, "_is_signed": None}
        return fragmented_array.FragmentedArray(**kept).to_layout(total.layout)

    return inline(total, apart, rank, me, sends.astype("int32"))


def _of_thread(start: Register) -> Register:
    """Where the first register of this thread lies, of those that begin somewhere."""
    text = (
        "{ .reg .b32 own; mov.u32 own, %tid.x; and.b32 own, own, 127; mad.lo.u32 $0, own, 4, $1; }"
    )
    return run(text, start)


def _send(start: Register, sends: Register, values: Sequence[Any]) -> None:
    """Stores sums in the first CTA, if there are any to be sent, and waits for all threads."""
    llvm: Any = utils.llvm
    stores = "".join(
        f"@given st.shared::cluster.f32 [there + {i * LINE}], ${i + 2};" for i in range(len(values))
    )
    llvm.inline_asm(
        utils.ir.Type.parse("!llvm.void"),
        [_of_thread(start), sends, *values],
        "{ .reg .pred given; .reg .b32 there; mapa.shared::cluster.u32 there, $0, 0;"
        f" setp.ne.u32 given, $1, 0; {stores} {MEET.text} }}",
        ",".join(["r", "r"] + ["f"] * len(values)),
        asm_dialect=0,
        has_side_effects=True,
    )


def _add(start: Register, rank: Register, values: Sequence[Any]) -> list[Any]:
    """Adds what another CTA has sent, in the first."""
    llvm: Any = utils.llvm
    single, count = utils.ir.F32Type.get(), len(values)
    adds = "".join(
        f"mov.f32 x, 0f00000000; @first ld.shared.f32 x, [${2 * count} + {i * LINE}];"
        f" add.f32 ${i}, ${count + i}, x;"
        for i in range(count)
    )
    made = llvm.inline_asm(
        llvm.StructType.get_literal([single] * count),
        [*values, _of_thread(start), rank],
        f"{{ .reg .pred first; .reg .f32 x; setp.eq.u32 first, ${2 * count + 1}, 0; {adds} }}",
        ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r", "r"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(single, made, [i]) for i in range(count)]
