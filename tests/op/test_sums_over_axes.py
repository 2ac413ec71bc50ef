"""Products whose contracted dimension is split over several axes: no sum may be missing."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import gemm, reduce_in
from pallas_gemm.op.mesh import reduction
from tests import meshes, reference

SPLITS = [("x", "y"), ("y", "x"), "x", "y"]
RESULTS = [P(), P("x", None), P("y", None), P(None, "x"), P(None, "y"), P("x", "y"), P(("x", "y"))]


def _operands(k: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    mesh = meshes.make_mesh(AxisType.Auto)
    rng = np.random.default_rng(0)
    a = meshes.place(mesh, reference.integers(rng, (16, 64), dtype), None, k)
    b = meshes.place(mesh, reference.integers(rng, (64, 32), dtype), k, None)
    return a, b


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["as-stored", "wider"])
@pytest.mark.parametrize(("k", "out"), list(itertools.product(SPLITS, RESULTS)), ids=str)
def test_every_sum_is_made_wherever_the_result_lies(k: Any, out: P, dtype: Any) -> None:
    a, b = _operands(k, dtype)
    sharding = NamedSharding(meshes.make_mesh(AxisType.Auto), out)
    with reduce_in(jnp.float32):
        result, _ = meshes.run(gemm, a, b, out=sharding)
    reference.assert_exact(result, reference.wide(a) @ reference.wide(b))


@pytest.mark.parametrize(
    ("sums", "out", "asked", "travelling"),
    [
        (jnp.float32, jnp.float32, None, jnp.float32),
        (jnp.float32, jnp.bfloat16, None, jnp.bfloat16),
        (jnp.float32, jnp.float16, None, jnp.float16),
        # 8 bits are too few for a sum that goes on.
        (jnp.float32, jnp.float8_e4m3fn, None, jnp.bfloat16),
        (jnp.float32, jnp.bfloat16, np.dtype(np.float32), jnp.float32),
        # Integers are never rounded.
        (jnp.int32, jnp.int32, np.dtype(np.float32), jnp.int32),
    ],
)
def test_the_type_in_which_sums_travel(sums: Any, out: Any, asked: Any, travelling: Any) -> None:
    assert reduction.travelling_dtype(sums, out, asked) == travelling
