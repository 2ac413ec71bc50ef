"""Functions in few instructions, precise as float32 or so: exp, logistic, sin, cos and others.

ex2 and rcp err by a unit in the last place, and what ex2 is given by half of one: the result of exp
errs by 6e-8 for each unit of its argument besides. Results below 2**-126 are 0.

sin and cos err by up to 2e-7 for arguments of up to a million, without a branch. They are no more
than numbers from -1 to 1 for arguments that are much larger: float32 hardly tells their angles.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from pallas_gemm.kernels.functions.saturating import LARGEST
from pallas_gemm.kernels.ptx.operation import Operation, like, number_in
from pallas_gemm.kernels.traced import Values

LOG2_E, MINUS_LOG2_E, ONE = "0f3FB8AA3B", "0fBFB8AA3B", "0f3F800000"
_EXP = f"""{{
    .reg .f32 x;
    mul.f32 x, $1, {LOG2_E};
    ex2.approx.ftz.f32 $0, x;
}}"""
EXP_BESIDE = f"""{{
    .reg .f32 x;
    sub.f32 x, $1, $2;
    mul.f32 x, x, {LOG2_E};
    ex2.approx.ftz.f32 $0, x;
}}"""
"""exp(x - y). The difference comes first: of equal numbers it is 0, however large they are. A mask
may put -1e30 in the place of each value of a row."""
_SIGMOID = f"""{{
    .reg .f32 x;
    mul.f32 x, $1, {MINUS_LOG2_E};
    ex2.approx.ftz.f32 x, x;
    add.f32 x, x, {ONE};
    rcp.approx.ftz.f32 $0, x;
}}"""
_NEAREST, _DOWN, _UP = (f"{{ cvt.{way}.f32.f32 $0, $1; }}" for way in ("rni", "rmi", "rpi"))
_TO_WHOLE = "0f4B400000"
"""1.5 * 2**23. A number to which it is added is rounded to a whole one, whose last bit is last."""
_OVER_PI, _HALF, _MINUS_HALF = "0f3EA2F983", "0f3F000000", "0fBF000000"
_PI = ("0f40490FDB", "0fB3BBBD2E", "0fA7772CED")
_MINUS_PI = ("0fC0490FDB", "0f33BBBD2E", "0f27772CED")
"""Three numbers that add up to pi, or to -pi. Multiplied in turn, they lose no digit."""
_SINE = ("0f362D9020", "0fB94FA020", "0f3C0886E7", "0fBE2AAAA3")
"""sin(r) is r + r**3 times this polynomial of r**2, highest power first: it errs by 1.2e-8 of
sin(r) at most, from -1.67 to 1.67."""
_LEAST, _MOST = "0fBFD5C28F", "0f3FD5C28F"
"""-1.67 and 1.67: angles are cut off here, which matters for huge arguments alone."""
_SIN_OF_ANGLE = f"""
    max.NaN.f32 r, r, {_LEAST};
    min.NaN.f32 r, r, {_MOST};
    mul.f32 s, r, r;
    fma.rn.f32 p, s, {_SINE[0]}, {_SINE[1]};
    fma.rn.f32 p, p, s, {_SINE[2]};
    fma.rn.f32 p, p, s, {_SINE[3]};
    mul.f32 p, p, s;
    fma.rn.f32 p, p, r, r;
    shl.b32 t, t, 31;
    xor.b32 $0, p, t;
}}"""
_SIN = f"""{{
    .reg .f32 t, k, r, s, p;
    fma.rn.f32 t, $1, {_OVER_PI}, {_TO_WHOLE};
    sub.f32 k, t, {_TO_WHOLE};
    fma.rn.f32 r, k, {_MINUS_PI[0]}, $1;
    fma.rn.f32 r, k, {_MINUS_PI[1]}, r;
    fma.rn.f32 r, k, {_MINUS_PI[2]}, r;{_SIN_OF_ANGLE}"""
"""With x = r + k * pi, sin(x) is sin(r) or -sin(r)."""
_COS = f"""{{
    .reg .f32 t, k, r, s, p;
    fma.rn.f32 t, $1, {_OVER_PI}, {_MINUS_HALF};
    add.f32 t, t, {_TO_WHOLE};
    sub.f32 k, t, {_TO_WHOLE};
    add.f32 k, k, {_HALF};
    neg.f32 r, $1;
    fma.rn.f32 r, k, {_PI[0]}, r;
    fma.rn.f32 r, k, {_PI[1]}, r;
    fma.rn.f32 r, k, {_PI[2]}, r;{_SIN_OF_ANGLE}"""
"""With x = (k + 1/2) * pi - r, cos(x) is sin(r) or -sin(r)."""

_LN2 = ("0fBF317218", "0f3102E308")
"""Two numbers that add up to -log(2)."""
_EXPM1_OF_REST = ("0f3AB5F600", "0f3C0913CE", "0f3D2AAB3A", "0f3E2AAA58", "0f3EFFFFFF")
"""exp(r) - 1 is r + r**2 times this polynomial of r, highest power first: it errs by 1.4e-8 of the
result at most, from -0.3467 to 0.3467."""
_EXPM1 = f"""{{
    .reg .f32 x, t, k, r, s, p;
    .reg .b32 power;
    max.NaN.f32 x, $1, 0fC1F00000;
    min.NaN.f32 x, x, 0f42B20000;
    fma.rn.f32 t, x, {LOG2_E}, {_TO_WHOLE};
    sub.f32 k, t, {_TO_WHOLE};
    fma.rn.f32 r, k, {_LN2[0]}, x;
    fma.rn.f32 r, k, {_LN2[1]}, r;
    fma.rn.f32 p, r, {_EXPM1_OF_REST[0]}, {_EXPM1_OF_REST[1]};
    fma.rn.f32 p, p, r, {_EXPM1_OF_REST[2]};
    fma.rn.f32 p, p, r, {_EXPM1_OF_REST[3]};
    fma.rn.f32 p, p, r, {_EXPM1_OF_REST[4]};
    mul.f32 s, r, r;
    fma.rn.f32 p, p, s, r;
    shl.b32 power, t, 23;
    add.s32 power, power, 1056964608;
    mov.b32 s, power;
    add.f32 r, s, {_MINUS_HALF};
    fma.rn.f32 p, p, s, r;
    add.f32 $0, p, p;
}}"""
"""With x = r + k * log(2), exp(x) - 1 is (exp(r) - 1) * 2**k + 2**k - 1. Half of it is added up,
where 2**(k - 1) is made of bits: 2**128 is no number. x is cut off at -30 and 89, where the result
is -1 and infinite."""


def _operation(text: str, function: Callable[[Values], Values]) -> Operation:
    """Returns the operation on float32 values in registers that a block of PTX is.

    Args:
        text: The block.
        function: The same in the words of JAX.
    """
    operation = Operation(lambda values, layout: _of_each(text, layout, values))
    return operation.meaning(lambda values, layout: function(values))  # noqa: ARG005 - on a GPU


exp = _operation(_EXP, lax.exp)
sigmoid = _operation(_SIGMOID, lax.logistic)
expm1 = _operation(_EXPM1, lax.expm1)
sin, cos = _operation(_SIN, lax.sin), _operation(_COS, lax.cos)
floor, ceil = _operation(_DOWN, lax.floor), _operation(_UP, lax.ceil)
nearest = _operation(_NEAREST, lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN))


@Operation
def one_plus_tanh(values: Values, scale: float, times: float, layout: Any) -> Any:
    """Returns `times * (1 + tanh(scale * x))` of float32 values in registers."""
    return _of_each(_one_plus_tanh(scale, times), layout, values)


@one_plus_tanh.meaning
def _(values: Values, scale: float, times: float, layout: Any) -> Any:
    # As precise as the instructions are for small results.
    del layout
    return 2 * times * lax.logistic(2 * scale * values)


@Operation
def saturated(values: Values, dtype: Any) -> Any:
    """Returns values clipped to what a type of 8 bits holds, in that type."""
    # The conversion is an instruction that saturates.
    return values.astype(dtype)


@saturated.meaning
def _(values: Values, dtype: Any) -> Any:
    largest = LARGEST[np.dtype(dtype)]
    return jnp.clip(values, -largest, largest).astype(dtype)


@Operation
def fma(inputs: Sequence[Any], signs: tuple[int, int], layout: Any) -> Any:
    """Returns x * y + z of float32 values in registers, some of which may be numbers.

    Args:
        inputs: x, y and z.
        signs: The signs of x * y and of z.
        layout: How the values lie in registers.
    """
    arrays = [x for x in inputs if np.ndim(x)]
    places = iter(range(1, len(arrays) + 1))
    x, y, z = (f"${next(places)}" if np.ndim(x) else _number(x) for x in inputs)
    # The assembler makes no instruction of a sign.
    text = f"""{{
        .reg .f32 x, z;
        {"neg" if signs[0] < 0 else "mov"}.f32 x, {x};
        {"neg" if signs[1] < 0 else "mov"}.f32 z, {z};
        fma.rn.f32 $0, x, {y}, z;
    }}"""
    return _of_each(text, layout, *arrays)


@fma.meaning
def _(inputs: Sequence[Any], signs: tuple[int, int], layout: Any) -> Any:
    del layout
    x, y, z = inputs
    return np.float32(signs[0]) * (x * y) + np.float32(signs[1]) * z


def _one_plus_tanh(scale: float, times: float) -> str:
    """PTX of 2 / (1 + exp(-2 x)), whose half is taken first."""
    factor, half = np.float32(-2 * math.log2(math.e) * scale), _number(0.5 / times)
    multiply = "mov.f32 x, $1" if factor == 1 else f"mul.f32 x, $1, {_number(factor)}"
    return f"""{{
        .reg .f32 x;
        {multiply};
        ex2.approx.ftz.f32 x, x;
        fma.rn.f32 x, x, {half}, {half};
        rcp.approx.ftz.f32 $0, x;
    }}"""


def _number(x: Any) -> str:
    """A number of float32 in PTX."""
    return f"0f{np.float32(x).view(np.uint32):08X}"


def _of_each(text: str, layout: Any, *arrays: Values) -> Any:
    """Runs a block of PTX, from `$1` and on to `$0`, on each value of arrays of one shape."""
    first = arrays[0]
    out = plgpu.ShapeDtypeStruct(first.shape, first.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * len(arrays), return_type=out)
    def inline(_: Any, *arrays: Values) -> Any:
        first = arrays[0]
        registers = np.empty_like(first.registers)
        for place in np.ndindex(registers.shape):
            registers[place] = of_register(text, [x.registers[place] for x in arrays])
        return like(first, registers)

    return inline(*arrays)


def of_register(text: str, given: Sequence[Any]) -> Any:
    """A register of Mosaic's is a vector of one or more numbers."""
    float32, found = ir.F32Type.get(), given[0]
    for i in range(ir.VectorType(found.type).shape[0]):
        each = [number_in(x, i) for x in given]
        x = utils.inline_ptx(text, *each, result_types=float32)
        found = vector.insert(x, found, dynamic_position=[], static_position=[i])
    return found
