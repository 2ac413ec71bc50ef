"""A left operand of few bits, which goes through registers on its way to the tensor cores.

A warpgroup's WGMMA of 64 rows and 16 contracted elements takes from the registers of each thread

    word    row                        contracted elements
    0, 1    lane / 4, and 8 below      2 * (lane % 4), and the next
    2, 3    the same                   8 further

of the 16 rows of its warp. `weights.py` loads them. Stored [k, rows], rows of a warp are in another
order, which `in_order` mends when all is summed up.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.element_types import BITS, E2M1, INT4
from pallas_gemm.kernels.hardware import WGMMA_DEPTH, WGMMA_ROWS
from pallas_gemm.kernels.ptx import weights, widen
from pallas_gemm.kernels.ptx.operation import Operation
from pallas_gemm.kernels.ptx.weights import Form
from pallas_gemm.kernels.ptx.widen import Register
from pallas_gemm.kernels.smem import ATOM_BYTES
from pallas_gemm.kernels.traced import Ref, Scalar, Values

LAYOUT = plgpu.Layout.WGMMA
NUMBER = plgpu.Layout.WG_SPLAT
IN_FLIGHT = 1
"""Groups of WGMMAs while the next weights are widened."""


@Operation
def add_step(total: Values, w: Ref, x: Ref, scales: Sequence[Ref], me: Scalar, form: Form) -> Any:
    """Adds the product of a step, and leaves its last WGMMAs in flight.

    Args:
        total: The sum.
        w: A slot of weights: [panel, line, bytes].
        x: A slot of the other operand: [panel, column, 64 contracted elements].
        scales: A slot of scales, [group, row], if there are any; then one of zero points, [array
            and consumer, group, row], or in bytes.
        me: Which of the consumers this is that share the rows.
        form: How all that lies there.
    """
    refs = [w, x, *scales]
    types = [plgpu.RefType((plgpu.SwizzleTransform(form.line),))]
    types += [plgpu.RefType((plgpu.SwizzleTransform(ATOM_BYTES),)), *[plgpu.RefType()] * 2]
    like = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(*types[: len(refs)], NUMBER, LAYOUT), return_type=like)
    def inline(_: Any, *given: Any) -> Any:
        *slots, me, total = given
        places = [_address(slot) for slot in slots]
        step = Step(form, places, me.registers.item())
        acc = total.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        registers = acc.registers.copy()
        for top in range(form.rows // WGMMA_ROWS):
            step.sums.append(registers[top : top + 1])
        step.emit()
        for top, sums in enumerate(step.sums):
            registers[top : top + 1] = sums
        kept = {"_registers": registers, "_layout": acc.layout, "_is_signed": None}
        return fragmented_array.FragmentedArray(**kept).to_layout(total.layout)

    return inline(*refs, me, total)


@add_step.meaning
def _(total: Values, w: Ref, x: Ref, scales: Sequence[Ref], me: Scalar, form: Form) -> Any:
    lines = w[...]
    weights = unpacked(lax.concatenate(list(lines), 1), form.kind)
    weights = weights if form.k_last else weights.T
    weights = lax.dynamic_slice_in_dim(weights, me * form.rows, form.rows, 0)

    def spread(each: Any) -> Any:
        own = lax.dynamic_slice_in_dim(each.astype(jnp.float32), me * form.rows, form.rows, 1)
        return jnp.repeat(own, form.depth // own.shape[0], 0).T

    if form.zeros is not None:
        blocks = scales[1][...][:, : scales[0].shape[0]]
        blocks = unpacked(blocks, form.zeros) if form.zeros in BITS else blocks
        weights -= spread(lax.concatenate(list(blocks), 1))
    if scales:
        weights *= spread(scales[0][...])
    info = jnp.finfo(form.to)
    # XLA might leave out a cast and the one that undoes it.
    weights = lax.reduce_precision(weights, info.nexp, info.nmant)
    other = lax.concatenate(list(x[...]), 1).astype(jnp.float32)
    return total + lax.dot_general(weights, other, (((1,), (1,)), ((), ())))


def unpacked(lines: Any, kind: np.dtype) -> Any:
    """Weights in float32 of the bytes that hold them, along the last dimension."""
    if BITS[kind] == 8:
        return lax.bitcast_convert_type(lines, kind).astype(jnp.float32)
    signed = kind == INT4
    high = lines if signed else lax.bitcast_convert_type(lines, jnp.uint8)
    both = jnp.stack([(high << 4) >> 4, high >> 4], -1).astype(jnp.int32)
    values = both.reshape(*lines.shape[:-1], -1)
    if kind != E2M1:
        return values.astype(jnp.float32)
    exponent, mantissa = (values >> 1) & 3, (values & 1).astype(jnp.float32)
    power = jnp.left_shift(1, jnp.maximum(exponent - 1, 0)).astype(jnp.float32)
    size = power * (jnp.where(exponent > 0, 1.0, 0.0) + 0.5 * mantissa)
    return jnp.where(values >= 8, -size, size)


@Operation
def in_order(total: Values) -> Any:
    """Puts the rows of each warp in order where two of a thread's were side by side."""
    like = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=like)
    def inline(_: Any, total: Values) -> Any:
        acc = total.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT)
        # Of 64 rows and 8 columns, a thread has four sums: two columns of one row, then of another.
        registers = acc.registers.copy()
        flat = registers.reshape(-1, 2, 2)
        for block in flat:
            for column in range(2):
                block[:, column] = _exchanged(*block[:, column])
        kept = {"_registers": flat.reshape(registers.shape), "_layout": acc.layout}
        ordered = fragmented_array.FragmentedArray(**kept, _is_signed=None)
        return ordered.to_layout(total.layout)

    return inline(total)


@in_order.meaning
def _(total: Values) -> Any:
    return total


_EXCHANGE = """{
    .reg .pred odd, low; .reg .b32 lane, source, one, two, here, there, bit;
    mov.u32 lane, %laneid;
    and.b32 bit, lane, 4;
    setp.ne.u32 odd, bit, 0;
    setp.lt.u32 low, lane, 16;
    shr.b32 source, lane, 3;
    shl.b32 source, source, 2;
    and.b32 bit, lane, 3;
    or.b32 source, source, bit;
    selp.b32 here, $2, $3, low;
    selp.b32 there, $3, $2, low;
    @odd add.u32 source, source, 16;
    shfl.sync.idx.b32 one, here, source, 31, 0xffffffff;
    xor.b32 source, source, 16;
    shfl.sync.idx.b32 two, there, source, 31, 0xffffffff;
    selp.b32 $0, two, one, odd;
    selp.b32 $1, one, two, odd;
}"""
"""A row of 16 has 2 * (lane / 4), and the next; the other order, lane / 4, and 8 below. An even row
comes from the first of a lane's two, an odd one from the second, half as far down."""


def _exchanged(first: Any, second: Any) -> tuple[Any, Any]:
    """Two sums of a thread after the exchange of rows, as vectors of one element."""
    word = utils.ir.IntegerType.get_signless(32)
    given = [utils.bitcast(x, word) for x in (first, second)]
    found = utils.inline_ptx(
        _EXCHANGE, *given, result_types=[word] * 2, has_side_effects=True, convergent=True
    )
    one, two = (utils.bitcast(x, first.type) for x in found)
    return one, two


def _address(ref: Any) -> Register:
    """Where something lies in shared memory."""
    word = utils.ir.IntegerType.get_signless(32)
    return utils.llvm.ptrtoint(word, utils.memref_ptr(ref))


class Step:
    """Emits a step of one warpgroup.

    Attributes:
        sums: Registers of the sum of each 64 rows.
    """

    def __init__(self, form: Form, slots: Sequence[Register], me: Register) -> None:
        """Says where its operands are.

        Args:
            form: How they lie there.
            slots: Where the slots of weights, the other operand, scales and zero points, if any,
                begin.
            me: Which consumer this is.
        """
        self.sums: list[Any] = []
        self._form, self._x = form, slots[1]
        self._scales, self._zeros = (*slots[2:], None, None)[:2]
        self._less: list[Any] = []
        thread = weights.thread(form, me)
        self._row, self._tops = thread.row, range(form.rows // WGMMA_ROWS)
        self._each: list[Any] = []
        loads = weights.AlongK if form.k_last else weights.AcrossK
        self._loads = loads(form, slots[0], thread)

    def emit(self) -> None:
        """Emits all of it: what is multiplied next is loaded before what is widened."""
        starts = range(0, self._form.depth, weights.BATCH)
        loaded = self._load(starts[0])
        for at in starts:
            words, loaded = loaded, self._load(at + weights.BATCH)
            self._issue(at, *words)

    def _load(self, at: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Loads a batch of weights, and scales and zero points where those of a group begin."""
        form = self._form
        if at >= form.depth:
            return [], [], []
        begins = form.group and at % form.group == 0
        scales = self._load_scales(at // form.group) if begins else []
        zeros = self._load_zeros(at // form.group) if begins and form.zeros else []
        return [self._loads.load(top, at) for top in self._tops], scales, zeros

    def _issue(self, at: int, loaded: Sequence[Any], scales: list[Any], zeros: list[Any]) -> None:
        """Issues the WGMMAs of a batch."""
        form, self._each, self._less = self._form, scales or self._each, zeros or self._less
        parts = range(weights.BATCH // WGMMA_DEPTH)
        fragments = [
            [self._fragment(top, x, part) for top, x in enumerate(loaded)] for part in parts
        ]
        descriptors = [self._describe(at + part * WGMMA_DEPTH) for part in parts]
        utils.nvvm.wgmma_fence_aligned()
        for own, descriptor in zip(fragments, descriptors, strict=True):
            for top, words in enumerate(own):
                self.sums[top] = _wgmma(self.sums[top], words, descriptor, form)
        utils.nvvm.wgmma_commit_group_sync_aligned()
        utils.nvvm.wgmma_wait_group_sync_aligned(IN_FLIGHT)

    def _fragment(self, top: int, loaded: Any, part: int) -> list[Register]:
        """The words of 64 rows and 16 contracted elements, ready to be multiplied."""
        form, found = self._form, []
        for number, spread in enumerate(self._loads.spread(loaded, part)):
            below = number % 2
            zero = self._less[top][below] if form.zeros else None
            exact, rest = (zero, None) if form.has_exact_zeros else (None, zero)
            pair = widen.widened(spread, form.kind, form.to, exact)
            if form.group:
                pair = widen.scaled(pair, self._each[top][below], form.scales, form.to, rest)
            found.append(pair)
        return found

    def _load_scales(self, group: int) -> list[Any]:
        """Loads the scales of a group, of each row of this thread."""
        form, found = self._form, []
        size = form.scales.itemsize
        place = widen.run(f"mad.lo.u32 $0, $1, {size}, $2;", self._row, self._scales)
        for top in self._tops:
            first = group * form.all_rows + top * WGMMA_ROWS
            words = [
                widen.load(place, (first + below) * size, size) for below in (0, form.row_below)
            ]
            if form.zeros and not form.has_exact_zeros:
                found.append([widen.single(word, form.scales) for word in words])
            else:
                found.append([widen.scale(word, form.scales, form.to) for word in words])
        return found

    def _load_zeros(self, group: int) -> list[Any]:
        """Loads the zero points of a group, of each row of this thread."""
        return [
            [
                self._load_zero(group, top * WGMMA_ROWS + below)
                for below in (0, self._form.row_below)
            ]
            for top in self._tops
        ]

    def _load_zero(self, group: int, below: int) -> Register:
        """Loads the zero point of a row so far below the first of this thread."""
        form, (lines, line, rows) = self._form, self._form.zeros_of_part
        bits = widen.bits(form.zeros)
        size = max(1, bits // 8)
        text = f"{{ .reg .b32 x; add.u32 x, $1, {below}; div.u32 $0, x, {rows};"
        text += f" mad.lo.u32 $0, $0, {lines * line}, $2; rem.u32 x, x, {rows};"
        text += f" mul.lo.u32 x, x, {bits}; shr.b32 x, x, 3; add.u32 $0, $0, x; }}"
        loaded = widen.load(widen.run(text, self._row, self._zeros), group * line, size)
        if form.has_exact_zeros:
            return widen.zero_point(loaded, self._row, below, form.kind, form.to)
        if form.zeros in BITS:
            pair = widen.zero_point(loaded, self._row, below, form.zeros, form.to)
            return widen.single(pair, form.to)
        return widen.single(loaded, form.zeros)

    def _describe(self, at: int) -> Any:
        """The descriptor of 16 contracted elements of the other operand."""
        panel, within = divmod(at * 2, ATOM_BYTES)
        first = panel * self._form.cols * ATOM_BYTES + within
        # Atoms of 8 columns follow each other; the last bit asks for their swizzle.
        text = (
            f"{{ .reg .b32 low, high; and.b32 low, $1, 0x3ffff; shr.b32 low, low, 4;"
            f" add.u32 low, low, {(first >> 4) + (1 << 16)};"
            f" mov.b32 high, {1 << 30 | 8 * ATOM_BYTES >> 4}; mov.b64 $0, {{low, high}}; }}"
        )
        return utils.inline_ptx(text, self._x, result_types=utils.ir.IntegerType.get_signless(64))


def _wgmma(sums: Any, words: Sequence[Register], descriptor: Any, form: Form) -> Any:
    """Issues a WGMMA whose left operand is in registers; returns the registers that it adds to."""
    ir = utils.ir
    llvm: Any = utils.llvm
    single, zero = ir.F32Type.get(), utils.c(0, ir.IntegerType.get_signless(32))
    values = [llvm.extractelement(x, zero) for x in sums.flat]
    count = len(values)
    names = ",".join(f"${i}" for i in range(count))
    left = ",".join(f"${2 * count + i}" for i in range(4))
    kind = {widen.BF16: "bf16", widen.F16: "f16"}[form.to]
    text = (
        "{ .reg .pred all; setp.ne.b32 all, 1, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{form.cols}k16.f32.{kind}.{kind} {{{names}}},"
        f" {{{left}}}, ${2 * count + 4}, all, 1, 1, 0; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"]
    made = llvm.inline_asm(
        llvm.StructType.get_literal([single] * count),
        [*values, *words, descriptor],
        text,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    empty = llvm.mlir_undef(sums.flat[0].type)
    found = np.empty(count, object)
    for i in range(count):
        found[i] = llvm.insertelement(empty, llvm.extractvalue(single, made, [i]), zero)
    return found.reshape(sums.shape)
