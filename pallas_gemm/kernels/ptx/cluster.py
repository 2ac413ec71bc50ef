"""Sums that CTAs of a cluster send to the one that adds them up, into its shared memory.

They are stored there asynchronously, and a barrier of that CTA counts their bytes. So nobody waits
but the one that adds, and for no more than these sums. For a barrier of the cluster, each thread
would have to wait until all that it has stored is seen by the whole GPU.

A CTA is sent sums for one of its tiles at most: a barrier is used once.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.kernels.ptx import sums
from pallas_gemm.kernels.ptx.operation import NUMBER, REF, Operation, Ptx, address_of, emit, word_of
from pallas_gemm.kernels.ptx.sums import AT_ONCE, LAYOUT, LINE
from pallas_gemm.kernels.ptx.widen import Register, run
from pallas_gemm.kernels.traced import Ref, Scalar, Values

BARRIER_WORDS = 2
_BARRIER_BYTES = 4 * BARRIER_WORDS
_BEGUN = Ptx("barrier.cluster.wait.aligned;", convergent=True)


@Operation
def begin(barriers: Ref) -> None:
    """Makes the barriers of this CTA, and tells the others of the cluster so.

    Args:
        barriers: Their words, of each consumer its own.
    """
    made = "".join(
        f"@first mbarrier.init.shared::cta.b64 [$0 + {i * _BARRIER_BYTES}], 1;"
        for i in range(barriers.shape[0])
    )
    Ptx(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x;"
        f" setp.eq.u32 first, thread, 0; {made}"
        " fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned; }",
        convergent=True,
    )([barriers])


@Operation
def begun() -> None:
    """Waits until all CTAs of the cluster have made their barriers."""
    _BEGUN()


@Operation
def send(total: Values, apart: Ref, barriers: Ref, me: Scalar, to: Scalar, place: Scalar) -> None:
    """Stores the sums of this warpgroup in another CTA.

    Args:
        total: The sums.
        apart: Where those of others come to lie there: [place, consumer, 4 registers, thread,
            register].
        barriers: As for `begin`.
        me: Which consumer this is.
        to: The other CTA.
        place: Which of the places.
    """
    types = (LAYOUT, REF, REF, NUMBER, NUMBER, NUMBER)
    _, consumers, lines, *_ = apart.shape

    @plgpu.inline_mgpu(arg_types=types)
    def inline(_: Any, total: Values, apart: Ref, barriers: Ref, *numbers: Any) -> None:
        me, to, place = map(word_of, numbers)
        start = _of_consumer(apart, me, lines * LINE)
        start = run(f"mad.lo.u32 $0, $1, {consumers * lines * LINE}, $2;", place, start)
        values = sums.values_of(sums.registers_of(total))
        stores = "".join(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
            f" [there + {i // AT_ONCE * LINE}],"
            f" {{${i + 3}, ${i + 4}, ${i + 5}, ${i + 6}}}, [barrier];"
            for i in range(0, len(values), AT_ONCE)
        )
        emit(
            "{ .reg .b32 there, barrier; mapa.shared::cluster.u32 there, $0, $2;"
            f" mapa.shared::cluster.u32 barrier, $1, $2; {stores} }}",
            [_of_thread(start), _of_consumer(barriers, me, _BARRIER_BYTES), to, *values],
            ["r", "r", "r", *["f"] * len(values)],
        )

    inline(total, apart, barriers, me, to, place)


@Operation
def with_others(total: Values, apart: Ref, barriers: Ref, me: Scalar, awaited: Scalar) -> Any:
    """Adds what other CTAs have sent, when all of it is there.

    Args:
        total: Sums of this warpgroup.
        apart: As for `send`.
        barriers: As for `begin`.
        me: Which consumer this is.
        awaited: How many others send sums.
    """
    places, consumers, lines, *_ = apart.shape
    types = (LAYOUT, REF, REF, NUMBER, NUMBER)

    @plgpu.inline_mgpu(arg_types=types, return_type=sums.type_of(total))
    def inline(_: Any, total: Values, apart: Ref, barriers: Ref, *numbers: Any) -> Any:
        me, awaited = map(word_of, numbers)
        _await(_of_consumer(barriers, me, _BARRIER_BYTES), awaited, lines * LINE)
        registers, start = sums.registers_of(total), _of_consumer(apart, me, lines * LINE)
        for place in range(places):
            at = _of_thread(run(f"add.u32 $0, $1, {place * consumers * lines * LINE};", start))
            registers = _with_another(registers, at, place, awaited)
        return sums.array_of(registers)

    return inline(total, apart, barriers, me, awaited)


def _await(barrier: Register, awaited: Register, size: int) -> None:
    """Waits until this number of others has sent sums, each of a size in bytes."""
    text = f"""{{
        .reg .pred none, first, there; .reg .b32 thread, size;
        setp.eq.u32 none, $1, 0;
        @none bra DONE;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, {WARPGROUP_THREADS - 1};
        setp.eq.u32 first, thread, 0;
        mul.lo.u32 size, $1, {size};
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], size;
        AWAIT:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 there, [$0], 0;
        @!there bra AWAIT;
        DONE:
    }}"""
    utils.inline_ptx(text, barrier, awaited, has_side_effects=True, convergent=True)


def _of_consumer(ref: Any, me: Register, size: int) -> Register:
    """Where what a consumer has of an array in shared memory begins, if each has that size."""
    return run(f"mad.lo.u32 $0, $1, {size}, $2;", me, address_of(ref))


def _of_thread(start: Register) -> Register:
    """Where the first registers of this thread lie, of those that begin somewhere."""
    text = "{ .reg .b32 own; mov.u32 own, %tid.x; and.b32 own, own, 127;"
    return run(f"{text} mad.lo.u32 $0, own, {4 * AT_ONCE}, $1; }}", start)


def _with_another(registers: Any, start: Register, place: int, awaited: Register) -> Any:
    """Adds what lies in a place, if something was sent there."""
    count = registers.size
    adds = "".join(
        "".join(f"mov.f32 x{j}, 0f00000000;" for j in range(AT_ONCE))
        + f"@sent ld.shared.v4.f32 {{x0, x1, x2, x3}}, [${2 * count} + {i // AT_ONCE * LINE}];"
        + "".join(f"add.f32 ${i + j}, ${count + i + j}, x{j};" for j in range(AT_ONCE))
        for i in range(0, count, AT_ONCE)
    )
    text = "{ .reg .pred sent; .reg .f32 x<4>;"
    text += f" setp.gt.u32 sent, ${2 * count + 1}, {place}; {adds} }}"
    given = [*sums.values_of(registers), start, awaited]
    return sums.added(registers, text, given, [*map(str, range(count)), "r", "r"])
