"""exp and the logistic function in two and four instructions, to about float32's precision.

ex2 and rcp err by a unit in the last place, and what ex2 is given by half of one: the result of exp
errs by 6e-8 for each unit of its argument besides. Results below 2**-126 are 0.
"""

from typing import Any

import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import vector

from pallas_gemm.kernels.ptx.operation import Operation
from pallas_gemm.kernels.traced import Values

LOG2_E, MINUS_LOG2_E, ONE = "0f3FB8AA3B", "0fBFB8AA3B", "0f3F800000"
_EXP = f"""{{
    .reg .f32 x;
    mul.f32 x, $1, {LOG2_E};
    ex2.approx.ftz.f32 $0, x;
}}"""
_SIGMOID = f"""{{
    .reg .f32 x;
    mul.f32 x, $1, {MINUS_LOG2_E};
    ex2.approx.ftz.f32 x, x;
    add.f32 x, x, {ONE};
    rcp.approx.ftz.f32 $0, x;
}}"""


@Operation
def exp(values: Values, layout: Any) -> Any:
    """Returns `exp(x)` of float32 values in registers."""
    return _of_each(_EXP, values, layout)


@exp.meaning
def _(values: Values, layout: Any) -> Any:
    del layout
    return lax.exp(values)


@Operation
def sigmoid(values: Values, layout: Any) -> Any:
    """Returns `1 / (1 + exp(-x))` of float32 values in registers."""
    return _of_each(_SIGMOID, values, layout)


@sigmoid.meaning
def _(values: Values, layout: Any) -> Any:
    del layout
    return lax.logistic(values)


def _of_each(text: str, values: Values, layout: Any) -> Any:
    """Runs a block of PTX, from `$1` to `$0`, on each value."""
    out = plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def inline(_: Any, values: Values) -> Any:
        registers = np.empty_like(values.registers)
        for place, register in np.ndenumerate(values.registers):
            registers[place] = _of_register(text, register)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=values.layout, _is_signed=values.is_signed
        )

    return inline(values)


def _of_register(text: str, register: Any) -> Any:
    """A register of Mosaic's is a vector of one or more numbers."""
    float32 = ir.F32Type.get()
    for i in range(ir.VectorType(register.type).shape[0]):
        x = vector.extract(register, dynamic_position=[], static_position=[i])
        x = utils.inline_ptx(text, x, result_types=float32)
        register = vector.insert(x, register, dynamic_position=[], static_position=[i])
    return register
