"""Types that no kernel takes: what the reason says, and what it advises."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels import element_types

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3, E5M2, INT8, INT32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.int32
DIVIDED = "with what {} was divided by as row_scale or col_scale"


@pytest.mark.parametrize(
    ("operands", "result", "reason"),
    [
        ((BF16,), F32, None),
        ((E4M3, E5M2), BF16, None),
        ((INT8,), INT32, None),
        ((INT8,), INT8, None),
        ((jnp.complex64,), F32, "no kernel takes operands of complex64"),
        ((BF16, F16), F32, "cast one of them to the type of the other"),
        ((BF16, F32), F32, "cast float32 to bfloat16"),
        ((E4M3, F32), F32, f"cast both to bfloat16, {DIVIDED.format('float8_e4m3fn')}"),
        ((INT8, BF16), F32, None),
        ((E4M3, F16), F32, None),
        ((INT8, E4M3), F32, "cast one of them to the type of the other"),
        ((BF16,), INT32, "no kernel makes a result of int32 from bfloat16"),
    ],
    ids=str,
)
def test_the_reason_names_the_types_and_what_to_cast(
    operands: tuple[Any, ...], result: Any, reason: str | None
) -> None:
    found = element_types.why_no_kernel(set(map(np.dtype, operands)), np.dtype(result))
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


def test_groups_take_no_weights_of_few_bits() -> None:
    types = {np.dtype(INT8), np.dtype(BF16)}
    found = element_types.why_no_kernel(types, np.dtype(F32), widened=False)
    assert "cast int8 to bfloat16, with what it was divided by as row_scale or" in str(found)
