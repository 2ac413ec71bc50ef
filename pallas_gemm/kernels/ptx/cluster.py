"""Sums that CTAs of a cluster send to the one that adds them up, into its shared memory."""

from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.kernels.ptx import sums
from pallas_gemm.kernels.ptx.operation import NUMBER, Operation, Ptx
from pallas_gemm.kernels.ptx.widen import Register, run
from pallas_gemm.kernels.traced import Ref, Scalar, Values

LAYOUT = plgpu.Layout.WGMMA
_ACC = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
LINE = 4 * WARPGROUP_THREADS
"""Bytes of a register of all threads."""
MEET = Ptx(
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
    convergent=True,
)


@Operation
def meet() -> None:
    """Waits for all threads of a cluster, and for what they have stored."""
    MEET()


@Operation
def send(total: Values, apart: Ref, me: Scalar, to: Scalar, place: Scalar) -> None:
    """Stores the sums of this warpgroup in another CTA.

    Args:
        total: The sums.
        apart: Where those of others come to lie there: [place, consumer, register, thread].
        me: Which consumer this is.
        to: The other CTA.
        place: Which of the places.
    """
    types = (LAYOUT, plgpu.RefType(), NUMBER, NUMBER, NUMBER)
    _, consumers, count, _ = apart.shape

    @plgpu.inline_mgpu(arg_types=types)
    def inline(_: Any, total: Values, apart: Ref, *numbers: Any) -> None:
        me, to, place = (x.registers.item() for x in numbers)
        start = _of_consumer(apart, me, count)
        start = run(f"mad.lo.u32 $0, $1, {consumers * count * LINE}, $2;", place, start)
        values = sums.values_of(total.to_layout(_ACC).registers)
        stores = "".join(
            f"st.shared::cluster.f32 [there + {i * LINE}], ${i + 2};" for i in range(count)
        )
        llvm: Any = utils.llvm
        llvm.inline_asm(
            utils.ir.Type.parse("!llvm.void"),
            [_of_thread(start), to, *values],
            f"{{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; {stores} }}",
            ",".join(["r", "r"] + ["f"] * count),
            asm_dialect=0,
            has_side_effects=True,
        )

    inline(total, apart, me, to, place)


@Operation
def with_others(total: Values, apart: Ref, me: Scalar, awaited: Scalar) -> Any:
    """Adds what other CTAs have sent, when all threads have met.

    Args:
        total: Sums of this warpgroup.
        apart: Where those of others lie: [place, consumer, register, thread].
        me: Which consumer this is.
        awaited: How many others have sent sums.
    """
    like = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=LAYOUT)
    places, consumers, count, _ = apart.shape

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(), NUMBER, NUMBER), return_type=like)
    def inline(_: Any, total: Values, apart: Ref, *numbers: Any) -> Any:
        me, awaited = (x.registers.item() for x in numbers)
        acc = total.to_layout(_ACC)
        registers, start = acc.registers, _of_consumer(apart, me, count)
        for place in range(places):
            at = _of_thread(run(f"add.u32 $0, $1, {place * consumers * count * LINE};", start))
            registers = _with_another(registers, at, place, awaited)
        kept = {"_registers": registers, "_layout": acc.layout, "_is_signed": None}
        return fragmented_array.FragmentedArray(**kept).to_layout(total.layout)

    return inline(total, apart, me, awaited)


def _of_consumer(apart: Any, me: Register, count: int) -> Register:
    """Where the first of the sums that are sent to a consumer lie."""
    word = utils.ir.IntegerType.get_signless(32)
    base = utils.llvm.ptrtoint(word, utils.memref_ptr(apart))
    return run(f"mad.lo.u32 $0, $1, {count * LINE}, $2;", me, base)


def _of_thread(start: Register) -> Register:
    """Where the first register of this thread lies, of those that begin somewhere."""
    text = (
        "{ .reg .b32 own; mov.u32 own, %tid.x; and.b32 own, own, 127; mad.lo.u32 $0, own, 4, $1; }"
    )
    return run(text, start)


def _with_another(registers: Any, start: Register, place: int, awaited: Register) -> Any:
    """Adds what lies in a place, if something was sent there."""
    count = registers.size
    adds = "".join(
        f"mov.f32 x, 0f00000000; @sent ld.shared.f32 x, [${2 * count} + {i * LINE}];"
        f" add.f32 ${i}, ${count + i}, x;"
        for i in range(count)
    )
    text = (
        f"{{ .reg .pred sent; .reg .f32 x; setp.gt.u32 sent, ${2 * count + 1}, {place}; {adds} }}"
    )
    given = [*sums.values_of(registers), start, awaited]
    return sums.added(registers, text, given, [*map(str, range(count)), "r", "r"])
