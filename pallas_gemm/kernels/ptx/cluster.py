"""What CTAs of a cluster hand over in registers, by way of the shared memory of the first."""

from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.kernels.ptx.operation import NUMBER, Operation, Program
from pallas_gemm.kernels.traced import Ref, Scalar, Values

LAYOUT = plgpu.Layout.WGMMA
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
    others, consumers, count, _ = apart.shape
    like = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=LAYOUT)
    types = (LAYOUT, plgpu.RefType(), NUMBER, NUMBER, NUMBER)
    line = 4 * WARPGROUP_THREADS

    @plgpu.inline_mgpu(arg_types=types, return_type=like)
    def inline(_: Any, total: Values, apart: Ref, *numbers: Any) -> Any:
        ir = utils.ir
        llvm: Any = utils.llvm
        word, single = ir.IntegerType.get_signless(32), ir.F32Type.get()
        rank, me, sends = (x.registers.item() for x in numbers)
        sends = utils.arith.extui(word, sends) if sends.type != word else sends
        acc = total.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        zero = utils.c(0, word)
        values = [llvm.extractelement(x, zero) for x in acc.registers.flat]
        base = llvm.ptrtoint(word, utils.memref_ptr(apart))

        def place(other: Any) -> Any:
            text = (
                "{ .reg .b32 thread; mov.u32 thread, %tid.x; and.b32 thread, thread, 127;"
                f" mad.lo.u32 $0, $1, {consumers}, $2; mad.lo.u32 $0, $0, {count * line}, $3;"
                " mad.lo.u32 $0, thread, 4, $0; }"
            )
            return utils.inline_ptx(text, other, me, base, result_types=word)

        mine = place(utils.arith.subi(rank, utils.c(1, word)))
        stores = "".join(
            f"@given st.shared::cluster.f32 [there + {i * line}], ${i + 2};" for i in range(count)
        )
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [mine, sends, *values],
            "{ .reg .pred given; .reg .b32 there; mapa.shared::cluster.u32 there, $0, 0;"
            f" setp.ne.u32 given, $1, 0; {stores} {MEET.text} }}",
            ",".join(["r", "r"] + ["f"] * count),
            asm_dialect=0,
            has_side_effects=True,
        )
        for other in range(others):
            at = place(utils.c(other, word))
            adds = "".join(
                f"mov.f32 x, 0f00000000; @first ld.shared.f32 x, [${2 * count} + {i * line}];"
                f" add.f32 ${i}, ${count + i}, x;"
                for i in range(count)
            )
            made = llvm.inline_asm(
                llvm.StructType.get_literal([single] * count),
                [*values, at, rank],
                "{ .reg .pred first; .reg .f32 x;"
                f" setp.eq.u32 first, ${2 * count + 1}, 0; {adds} }}",
                ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r", "r"]),
                asm_dialect=0,
                has_side_effects=True,
            )
            values = [llvm.extractvalue(single, made, [i]) for i in range(count)]
        registers = acc.registers.copy()
        for i, x in enumerate(values):
            registers.flat[i] = llvm.insertelement(
                llvm.mlir_undef(acc.registers.flat[i].type), x, zero
            )
        kept = {"_registers": registers, "_layout": acc.layout, "_is_signed": None}
        return fragmented_array.FragmentedArray(**kept).to_layout(total.layout)

    return inline(total, apart, rank, me, sends.astype("int32"))
