"""`jax.export` of models with the op: written here, run or compiled by another process."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_gemm
from pallas_gemm import offline
from pallas_gemm.flax import linen as fused
from pallas_gemm.flax import nnx as fused_nnx
from tests import layers

needs_compiler = pytest.mark.skipif(
    bool(offline.missing_packages()), reason="needs the extra aot, which brings the compiler"
)

WIDTH, HIDDEN, ROWS = 256, 512, 256
Arrays = tuple[Any, ...]


def _linen_step() -> tuple[Any, Arrays]:
    """A training step of a layer with all that is fused, in bfloat16."""
    layer = fused.Dense(WIDTH, activation="gelu", dtype=jnp.bfloat16)
    x = layers.normal(ROWS, WIDTH, dtype=jnp.bfloat16)
    params = layer.init(jax.random.key(0), x)

    def loss(params: Any, x: jax.Array) -> Any:
        return jnp.mean(jnp.square(layer.apply(params, x, residual=x)), dtype=jnp.float32)

    def step(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step, (params, x)


class Block(nnx.Module):
    """A gated feed-forward network."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.gated = fused_nnx.GatedDense(WIDTH, HIDDEN, **options)
        self.down = fused_nnx.Linear(HIDDEN, WIDTH, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.gated(x), residual=x)


def _nnx_forward() -> tuple[Any, Arrays]:
    model, state = nnx.split(Block(nnx.Rngs(0)))
    x = layers.normal(ROWS, WIDTH, dtype=jnp.bfloat16)

    def forward(params: Any, x: jax.Array) -> jax.Array:
        filled = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
        return nnx.merge(model, filled)(x)

    # A plain tree, which can be written without telling JAX about Flax's types.
    return forward, (nnx.to_pure_dict(state), x)


# The program, and how many products it has.
PROGRAMS = {"linen step": (_linen_step, 2), "nnx forward": (_nnx_forward, 2)}


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> tuple[Any, Arrays, int, bytearray]:
    """A function, its arguments, the number of its products, and itself for two platforms."""
    make, products = PROGRAMS[request.param]
    f, args = make()
    with pallas_gemm.target("h200"):
        exported = jax.export.export(jax.jit(f), platforms=["cuda", "cpu"])(*args)
    return f, args, products, exported.serialize()


RUN = """
import sys
import jax, numpy as np
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
given = np.load(sys.argv[2])
leaves = [given[name].view(aval.dtype).reshape(aval.shape)
          for name, aval in zip(given.files, exported.in_avals, strict=True)]
args, _ = jax.tree.unflatten(exported.in_tree, leaves)
results = jax.tree.leaves(jax.jit(exported.call)(*args))
np.savez(sys.argv[3], *(np.asarray(x).view(np.uint8) for x in map(np.atleast_1d, results)))
print([name for name in sys.modules if name.split(".")[0] in ("flax", "pallas_gemm")])
"""


def test_another_process_computes_the_same(
    program: tuple[Any, Arrays, int, bytearray], tmp_path: pathlib.Path
) -> None:
    f, args, _, written = program
    (tmp_path / "program").write_bytes(written)
    leaves = [np.atleast_1d(np.asarray(x)).view(np.uint8) for x in jax.tree.leaves(args)]
    np.savez(tmp_path / "given.npz", *leaves)
    names = [str(tmp_path / name) for name in ("program", "given.npz", "found.npz")]
    # As it is set here (see conftest.py), without which the last bit may be another.
    here = jax.config.read("jax_disable_most_optimizations")
    done = subprocess.run(
        [sys.executable, "-c", RUN, *names],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(here)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # It needs neither the library nor Flax.
    assert done.stdout == "[]\n"
    found = np.load(tmp_path / "found.npz")
    wanted = jax.tree.leaves(jax.jit(f)(*args))
    for name, own in zip(found.files, wanted, strict=True):
        result = found[name].view(own.dtype).reshape(own.shape)
        np.testing.assert_array_equal(result, np.asarray(own))


@needs_compiler
def test_for_a_gpu_it_holds_the_kernels(program: tuple[Any, Arrays, int, bytearray]) -> None:
    _, args, products, written = program
    exported = jax.export.deserialize(written)
    assert exported.platforms == ("cuda", "cpu")
    assert "custom_call @mosaic_gpu_v2" in exported.mlir_module()
    reports = offline.compile_reports(exported.call, *args, target="h200")
    assert len(reports) == products
    assert {report.spill_bytes for report in reports} == {0}
    assert all("wgmma.mma_async" in report.ptx for report in reports)


def test_sizes_may_be_symbols() -> None:
    rows, depth = jax.export.symbolic_shape("rows, depth")

    def loss(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        hidden = jax.vmap(lambda x: pallas_gemm.gemm(x, w, bias=bias, activation="relu"))(x)
        contracted = pallas_gemm.dot_general(x, hidden, (((0, 2), (0, 2)), ((), ())))
        return jnp.sum(contracted, dtype=jnp.float32)

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    symbols = [((rows, 4, depth), (depth, depth), (depth,)), ((rows, 4, 512), (512, 512), (512,))]
    for shapes in symbols:
        arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        with pallas_gemm.target("h200"):
            exported = jax.export.export(step, platforms=["cpu", "cuda"])(*arguments)
            with pytest.raises(ValueError, match="sizes that are symbols"):
                jax.export.export(
                    jax.jit(lambda x, w: pallas_gemm.gemm(x, w, schedule="hilbert")),
                    platforms=["cuda"],
                )(*arguments[:2])
    x, w, bias = (jnp.ones(shape, jnp.bfloat16) for shape in ((3, 4, 512), (512, 512), (512,)))
    value, gradients = exported.call(x, w, bias)
    wanted, exact = step(x, w, bias)
    assert value == wanted
    jax.tree.map(np.testing.assert_array_equal, gradients, exact)


def test_records_among_results_are_written_and_read() -> None:
    def records(x: jax.Array, labels: jax.Array) -> tuple[Any, ...]:
        return pallas_gemm.quantize(x), pallas_gemm.linear_log_probs(x, x, labels)

    x, labels = jnp.ones((4, 4)), jnp.arange(4)
    written = jax.export.export(jax.jit(records))(x, labels).serialize()
    quantized, found = jax.export.deserialize(written).call(x, labels)
    assert isinstance(quantized, pallas_gemm.Quantized)
    assert isinstance(found, pallas_gemm.LogProbs)
