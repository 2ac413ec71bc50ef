"""The logistic function in four instructions, instead of an exponential and a division of IEEE's.

Its error is a few units in the last place where the result is not tiny: ex2 and rcp err by one, and
the error of ex2's argument grows with it. A result below 2**-126 is 0.
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

MINUS_LOG2_E = "0fBFB8AA3B"
ONE = "0f3F800000"
_OF_ONE = f"""{{
    .reg .f32 x;
    mul.f32 x, $1, {MINUS_LOG2_E};
    ex2.approx.ftz.f32 x, x;
    add.f32 x, x, {ONE};
    rcp.approx.ftz.f32 $0, x;
}}"""


@Operation
def sigmoid(values: Values, layout: Any) -> Any:
    """Returns `1 / (1 + exp(-x))` of float32 values in registers."""
    out = plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def inline(_: Any, values: Values) -> Any:
        registers = np.empty_like(values.registers)
        for place, register in np.ndenumerate(values.registers):
            registers[place] = _of_register(register)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=values.layout, _is_signed=values.is_signed
        )

    return inline(values)


def _of_register(register: Any) -> Any:
    """A register of Mosaic's is a vector of one or more numbers."""
    float32 = ir.F32Type.get()
    for i in range(ir.VectorType(register.type).shape[0]):
        x = vector.extract(register, dynamic_position=[], static_position=[i])
        x = utils.inline_ptx(_OF_ONE, x, result_types=float32)
        register = vector.insert(x, register, dynamic_position=[], static_position=[i])
    return register


@sigmoid.meaning
def _(values: Values, layout: Any) -> Any:
    del layout
    return lax.logistic(values)
