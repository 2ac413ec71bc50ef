"""Products on several GPUs, with the kernels: shared out by XLA, and by kernels that send."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import all_gather_gemm, explain_on_mesh, gemm, gemm_reduce_scatter
from tests import reference

pytestmark = pytest.mark.gpu("hopper")

SIZE = 2048


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    """All GPUs of the computer along one axis."""
    devices = np.array(jax.devices())
    if devices.size < 2:
        pytest.skip("one GPU is no mesh")
    return Mesh(devices, ("x",), axis_types=(AxisType.Auto,))


def _integers(mesh: Mesh, spec: P, seed: int) -> jax.Array:
    x = reference.integers(np.random.default_rng(seed), (SIZE, SIZE), jnp.bfloat16)
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("a_spec", "b_spec"),
    [(P("x", None), P()), (P(), P(None, "x")), (P(None, "x"), P("x", None))],
    ids=["rows", "columns", "contracted"],
)
def test_a_shared_product(mesh: Mesh, a_spec: P, b_spec: P) -> None:
    a, b = _integers(mesh, a_spec, 0), _integers(mesh, b_spec, 1)
    assert explain_on_mesh(gemm, a, b).implementation == "hopper"
    reference.assert_exact(jax.jit(gemm)(a, b), reference.wide(a) @ reference.wide(b))


def test_collectives_forward_and_backward(mesh: Mesh) -> None:
    x, w = _integers(mesh, P("x", None), 0), _integers(mesh, P(None, "x"), 1)
    v = _integers(mesh, P("x", None), 2)

    def local(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        hidden = all_gather_gemm(x, w, "x", activation="relu")
        return gemm_reduce_scatter(hidden, v, "x")

    specs = (P("x", None), P(None, "x"), P("x", None))
    fused = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("x", None))

    def stock(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w) @ v

    def derived(f: Callable[..., jax.Array], *operands: Any) -> list[Any]:
        def loss(*operands: Any) -> jax.Array:
            result = f(*operands).astype(jnp.float32)
            return jnp.mean(result * jnp.sin(result / SIZE))

        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*operands))

    exact = derived(stock, *(z.astype(jnp.float32) for z in (x, w, v)))
    for ours, theirs, value in zip(
        derived(fused, x, w, v), derived(stock, x, w, v), exact, strict=True
    ):
        errors = [np.linalg.norm(reference.wide(z) - reference.wide(value)) for z in (ours, theirs)]
        assert errors[0] <= 2 * errors[1]
