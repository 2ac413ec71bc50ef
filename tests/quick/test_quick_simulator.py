"""What the quick simulator computes in another way than JAX is the same."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock  # noqa: TID251
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory  # noqa: TID251
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.quick import numpy_programs
from tests.quick import simulator as quick_simulator


def _clock(*times: int) -> NpVectorClock:
    clock = NpVectorClock(len(times))
    clock.clock[:] = times
    return clock


def test_clocks_are_ordered_as_by_jax() -> None:
    clocks = [_clock(*times) for times in itertools.product(range(3), repeat=3)]
    for one, other in itertools.product(clocks, repeat=2):
        expected = one.lt(other) or other.lt(one)
        assert quick_simulator.ordered(one, other) == expected


@pytest.mark.parametrize(
    "cls", [shared_memory.HostAllocationRequest, shared_memory.HostAllocationKey]
)
def test_requests_are_read_as_by_jax(cls: Any) -> None:
    numbers = np.arange(3, 3 + cls.shape_and_dtype().shape[0], dtype=np.int32)
    read = cls.from_array(numbers)
    assert list(read) == numbers.tolist()
    assert list(cls.from_array(read.as_np_array)) == numbers.tolist()
    for wrong in (numbers[1:], numbers.astype(np.float32)):
        with pytest.raises(ValueError, match="integers"):
            cls.from_array(wrong)


def test_a_thread_that_fails_outside_of_a_callback_ends_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(eqn: Any, *_: Any) -> Any:
        raise ArithmeticError(eqn.primitive.name)

    monkeypatch.setattr(numpy_programs, "_of_jax", fail)

    def body(out: Any, scratch: Any, barrier: Any) -> None:
        @pl.when(lax.axis_index("role") == 0)
        def _wait() -> None:
            plgpu.barrier_wait(barrier)
            out[...] = scratch[...]

        @pl.when(lax.axis_index("role") == 1)
        def _arrive() -> None:
            scratch[...] = lax.erf(scratch[...])
            plgpu.barrier_arrive(barrier)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
        num_threads=2,
        thread_name="role",
        interpret=plgpu.InterpretGPUParams(),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="ArithmeticError: erf"):
        jax.block_until_ready(kernel())
    gpu_callbacks.reset_gpu_interpret_mode_state()


def test_a_barrier_has_the_key_that_jax_finds() -> None:
    keys = jnp.arange(2 * 3 * 6).reshape(2, 3, 6)
    quick = quick_simulator.Keys(keys)
    for row, col in itertools.product(range(2), range(3)):
        for index in ((row, col), (jnp.int32(row), col), (row, jnp.int32(col))):
            np.testing.assert_array_equal(quick[index], keys[row, col])
        np.testing.assert_array_equal(quick[(row,)], keys[row])
