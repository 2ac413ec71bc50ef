"""A left operand that goes through registers on its way to the tensor cores.

A warpgroup's WGMMA of 64 rows and 16 contracted elements takes from the registers of each thread

    word    row                        contracted elements
    0, 1    lane / 4, and 8 below      2 * (lane % 4), and the next
    2, 3    the same                   8 further

of the 16 rows of its warp. A WGMMA of TF32 takes 8 contracted elements:

    0, 1    lane / 4, and 8 below      lane % 4
    2, 3    the same                   4 further

`weights.py` loads them. Stored [k, rows], rows of sums are in another order, which `row_order.py`
mends when all is summed up.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels import element_types
from pallas_gemm.kernels.element_types import BITS, E2M1, INT4
from pallas_gemm.kernels.hardware import WARPGROUP_THREADS, WGMMA_ROWS
from pallas_gemm.kernels.ptx import small, sums, weights, widen
from pallas_gemm.kernels.ptx.form import FEW_COLUMNS, Form
from pallas_gemm.kernels.ptx.multiply import Multiplier
from pallas_gemm.kernels.ptx.operation import NUMBER, REF, Operation, address_of, word_of
from pallas_gemm.kernels.ptx.sums import LAYOUT
from pallas_gemm.kernels.ptx.widen import Register
from pallas_gemm.kernels.smem import ATOM_BYTES
from pallas_gemm.kernels.traced import Ref, Scalar, Values

OF_THREADS = plgpu.Layout.WG_STRIDED((WARPGROUP_THREADS,), vec_size=1)
"""A word of each thread."""


@Operation
def places(me: Scalar, form: Form) -> list[Any]:
    """Returns what each thread has the same of in all steps: where its weights are in any slot.

    Args:
        me: Which of the consumers this is that share the rows.
        form: How operands lie in a slot.
    """
    like = plgpu.ShapeDtypeStruct((WARPGROUP_THREADS,), jnp.dtype(jnp.int32), layout=OF_THREADS)

    @plgpu.inline_mgpu(arg_types=(NUMBER,), return_type=[like] * weights.count(form))
    def inline(_: Any, me: Any) -> Any:
        ir, layout = utils.ir, OF_THREADS.to_mgpu()
        of_one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        return [
            fragmented_array.FragmentedArray(
                _registers=np.array([utils.bitcast(x, of_one)], object),
                _layout=layout,
                _is_signed=True,
            )
            for x in weights.places(form, word_of(me))
        ]

    return inline(me)


@places.meaning
def _(me: Scalar, form: Form) -> list[Any]:
    del me, form
    return []


@Operation
def add_step(
    total: Values,
    w: Ref,
    x: Ref,
    scales: Sequence[Ref],
    me: Scalar,
    own: Sequence[Values],
    form: Form,
) -> Any:
    """Adds the product of a step / `form.part`, and may leave its last WGMMAs in flight.

    Args:
        total: The sum.
        w: A slot of weights: [panel, line, bytes], or float32.
        x: A slot of the other operand: [panel, column, contracted elements of a panel].
        scales: A slot of scales, [group, row], if there are any; then one of zero points, [array
            and consumer, group, row], or in bytes.
        me: Which of the consumers this is that share the rows.
        own: The result of `places`.
        form: How all that lies there.
    """
    del me  # `own` says what follows from it.
    refs = [w, x, *scales]
    types = [plgpu.RefType((plgpu.SwizzleTransform(form.line),))]
    types += [plgpu.RefType((plgpu.SwizzleTransform(ATOM_BYTES),)), *[REF] * 2]
    kinds = (*types[: len(refs)], *[OF_THREADS] * len(own), LAYOUT)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=sums.type_of(total))
    def inline(_: Any, *given: Any) -> Any:
        slots, own, total = given[: len(refs)], given[len(refs) : -1], given[-1]
        step = Step(form, [address_of(slot) for slot in slots], [word(x) for x in own])
        registers = sums.registers_of(total).copy()
        for top in range(form.rows // WGMMA_ROWS):
            step.sums.append(registers[top : top + 1])
        # A register of a group's sums has any value before its first WGMMA.
        step.of_group = list(step.sums)
        step.emit()
        for top, own in enumerate(step.sums):
            registers[top : top + 1] = own
        return sums.array_of(registers)

    return inline(*refs, *own, total)


@add_step.meaning
def _(
    total: Values,
    w: Ref,
    x: Ref,
    scales: Sequence[Ref],
    me: Scalar,
    own: Sequence[Values],
    form: Form,
) -> Any:
    del own
    lines = w[...]
    weights = unpacked(lax.concatenate(list(lines), 1), form.kind)
    weights = weights if form.k_last else weights.T
    weights = lax.dynamic_slice_in_dim(weights, me * form.rows, form.rows, 0)
    other = lax.concatenate(list(x[...]), 1).astype(jnp.float32)

    def spread(each: Any) -> Any:
        own = lax.dynamic_slice_in_dim(each.astype(jnp.float32), me * form.rows, form.rows, 1)
        return jnp.repeat(own, form.depth // own.shape[0], 0).T

    if form.zeros is not None:
        blocks = scales[1][...][:, : scales[0].shape[0]]
        blocks = unpacked(blocks, form.zeros) if form.zeros in BITS else blocks
        weights -= spread(lax.concatenate(list(blocks), 1))
    weights /= float(form.part)
    if form.scales_sums:
        each = scales[0][...].astype(jnp.float32)
        each = lax.dynamic_slice_in_dim(each, me * form.rows, form.rows, 1)
        parts = [jnp.split(values, len(each), 1) for values in (weights, other)]
        sums = [_sums(*pair) * own[:, None] for *pair, own in zip(*parts, each, strict=True)]
        return total + sum(sums)
    if scales:
        weights *= spread(scales[0][...])
    info = jnp.finfo(form.to)
    # XLA might leave out a cast and the one that undoes it.
    return total + _sums(lax.reduce_precision(weights, info.nexp, info.nmant), other)


def _sums(weights: Any, other: Any) -> Any:
    return lax.dot_general(weights, other, (((1,), (1,)), ((), ())))


def unpacked(lines: Any, kind: np.dtype) -> Any:
    """Weights in float32 of the bytes that hold them, along the last dimension."""
    if lines.dtype == kind:
        return lines.astype(jnp.float32)
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


def word(values: Any) -> Register:
    """The word of each thread, of an array that has one for each."""
    (own,) = values.registers.flat
    return utils.bitcast(own, utils.ir.IntegerType.get_signless(32))


class Step:
    """Emits a step of one warpgroup: loads, widens, multiplies.

    Attributes:
        sums: Registers of the sum of each 64 rows.
        of_group: The same of a group of which the sums are scaled.
    """

    def __init__(self, form: Form, slots: Sequence[Register], places: Sequence[Register]) -> None:
        """Says where its operands are.

        Args:
            form: How they lie there.
            slots: Where the slots of weights, the other operand, scales and zero points, if any,
                begin.
            places: The result of `weights.places`.
        """
        self.sums: list[Any] = []
        self.of_group: list[Any] = []
        self._form, self._multiplier = form, Multiplier(form, slots[1])
        self._scales, self._zeros = (*slots[2:], None, None)[:2]
        self._less: list[Any] = []
        unknown = slots[0] if form.cols <= FEW_COLUMNS else None
        self._plain = small.unscaled(form.kind, unknown) if form.is_small else None
        self._row, self._tops = places[0], range(form.rows // WGMMA_ROWS)
        self._each: list[Any] = []
        self._loads = weights.loader(form, slots[0], places)

    def emit(self) -> None:
        """Emits all of it: what is multiplied next is loaded before what is widened."""
        batch = self._form.batch
        loaded = self._load(0)
        for at in range(0, self._form.depth, batch):
            words, loaded = loaded, self._load(at + batch)
            self._issue(at, *words)
            if self._form.scales_sums and (at + batch) % self._form.share == 0:
                self._end_group()

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
        """Widens and multiplies a batch."""
        form, self._each, self._less = self._form, scales or self._each, zeros or self._less
        left = [
            [self._fragment(top, x, part) for top, x in enumerate(loaded)]
            for part in range(form.batch // form.wgmma_depth)
        ]
        target = self.of_group if form.scales_sums else self.sums
        begins = form.scales_sums and at % form.share == 0
        self._multiplier.multiply(target, left, at, begins)

    def _end_group(self) -> None:
        """Adds the sums of a group, scaled, to all others."""
        self._multiplier.finish()
        for top, (own, each) in enumerate(zip(self.of_group, self._each, strict=True)):
            self.sums[top] = sums.scaled(self.sums[top], own, each)

    def _fragment(self, top: int, loaded: Any, part: int) -> list[Register]:
        """The words of 64 rows and the contracted elements of a WGMMA, ready to be multiplied."""
        form, found = self._form, []
        for number, spread in enumerate(self._loads.spread(top, loaded, part)):
            below = number % 2
            exact = self._less[top][below] if form.has_exact_zeros else None
            if self._plain is not None:
                terms = self._each[top][below] if form.scales_at_once else self._plain
                terms = terms if exact is None else terms._replace(less=exact)
                pair = small.widened(form.kind, spread, terms)
            else:
                pair = widen.widened(spread.word, form.kind, form.to, exact)
            if form.group and not (form.scales_sums or form.scales_at_once):
                rest = self._less[top][below] if form.zeros and exact is None else None
                pair = widen.scaled(pair, self._each[top][below], form.scales, form.to, rest)
            found.append(pair)
        return found

    def _load_scales(self, group: int) -> list[Any]:
        """Loads the scales of a group, of each row of this thread."""
        form, found = self._form, []
        size = form.scales.itemsize
        place = widen.run(f"mad.lo.u32 $0, $1, {size}, $2;", self._row, self._scales)
        for top in self._tops:
            rows = [group * form.all_rows + form.row_offset(top, below) for below in range(2)]
            words = [widen.load(place, row * size, size) for row in rows]
            if form.scales_at_once:
                twice = [widen.scale(word, form.scales, form.to) for word in words]
                found.append([small.scaled(form.kind, x) for x in twice])
            elif form.scales_sums or (form.zeros and not form.has_exact_zeros):
                found.append([widen.single(word, form.scales) for word in words])
            else:
                found.append([widen.scale(word, form.scales, form.to) for word in words])
        return found

    def _load_zeros(self, group: int) -> list[Any]:
        """Loads the zero points of a group, of each row of this thread."""
        return [
            [self._load_zero(group, self._form.row_offset(top, below)) for below in range(2)]
            for top in self._tops
        ]

    def _load_zero(self, group: int, below: int) -> Register:
        """Loads the zero point of a row so far below the first of this thread."""
        form, (lines, line, rows) = self._form, self._form.zeros_of_part
        bits = element_types.bits(form.zeros)
        size = max(1, bits // 8)
        text = f"{{ .reg .b32 x; add.u32 x, $1, {below}; div.u32 $0, x, {rows};"
        text += f" mad.lo.u32 $0, $0, {lines * line}, $2; rem.u32 x, x, {rows};"
        text += f" mul.lo.u32 x, x, {bits}; shr.b32 x, x, 3; add.u32 $0, $0, x; }}"
        loaded = widen.load(widen.run(text, self._row, self._zeros), group * line, size)
        if form.zeros in BITS:
            both = widen.spread_zero(loaded, self._row, below, form.zeros)
            if form.is_small:
                return small.zero_point(form.kind, both)
            pair = widen.zero_point(both, form.zeros, form.to)
            return pair if form.has_exact_zeros else widen.single(pair, form.to)
        zero = widen.single(loaded, form.zeros)
        return widen.divided(zero, form.part) if form.is_small else zero
