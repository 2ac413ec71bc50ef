"""`numerics`: rows keep their bits among others, or an error says why not; and the test kit."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core

import pallas_gemm
from pallas_gemm import (
    HopperConfig,
    dot_general,
    einsum,
    explain,
    gated_gemm,
    gemm,
    gram,
    grouped_gemm,
    matmul,
    numerics,
    projections,
    ragged_dot,
    ragged_dot_general,
    target,
)
from pallas_gemm.api import bits
from pallas_gemm.op.mesh import parts
from pallas_gemm.planning import dispatch
from pallas_gemm.planning.by_xla import xla_groups
from pallas_gemm.planning.sums import Sums
from tests.small_transformer import Transformer

pytestmark = pytest.mark.usefixtures("empty_kernels")

ROWS = numerics(invariant="rows")
SIMULATED: dict[str, Any] = {"numerics": ROWS, "implementation": "interpret"}
M, K, N = 70, 136, 80


def draw(*shape: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


X, W, BIAS = draw(M, K), draw(K, N, seed=1), draw(N, dtype=jnp.float32, seed=2)
WIDE = draw(M, K, dtype=jnp.float32)
HEADS = draw(2, K, 64, seed=3)
SIZES = jnp.array([23, 40], jnp.int32)
ROWS_OF_BATCH = 512


def lowered(f: Callable[..., Any], *args: Any) -> str:
    """Returns the program for an H200."""
    with target("h200"):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


KEPT: dict[str, Callable[[jax.Array], Any]] = {
    "gelu": lambda x: gemm(x, W, bias=BIAS, activation="gelu", **SIMULATED),
    "float32": lambda x: gemm(x, W, preferred_element_type=jnp.float32, **SIMULATED),
    "gated": lambda x: gated_gemm(x, HEADS[0], HEADS[1], **SIMULATED),
    "vmap": jax.vmap(lambda row: gemm(row, W, bias=BIAS, **SIMULATED)),
    "dx": lambda x: jax.vjp(lambda y: gemm(y, W, activation="silu", **SIMULATED), x)[1](
        jnp.tanh(x[:, :N])
    )[0],
}


@pytest.mark.parametrize("name", KEPT)
def test_rows_keep_their_bits(name: str) -> None:
    found = numerics.check(KEPT[name], X, variants=3)
    assert found, found
    assert found.elements > 0


def test_a_row_in_a_batch_has_the_bits_of_the_row_alone() -> None:
    whole = gemm(X, W, **SIMULATED)
    for row in (0, 64, M - 1):
        np.testing.assert_array_equal(gemm(X[row], W, **SIMULATED), whole[row])


def test_groups_have_the_bits_of_their_products() -> None:
    found = grouped_gemm(X, HEADS, SIZES, **SIMULATED)
    first, second = int(SIZES[0]), int(SIZES[1])
    np.testing.assert_array_equal(found[:first], gemm(X[:first], HEADS[0], **SIMULATED))
    rest = gemm(X[first : first + second], HEADS[1], **SIMULATED)
    np.testing.assert_array_equal(found[first : first + second], rest)


@pytest.mark.parametrize("axes", [(0, 0), (None, 0)], ids=str)
def test_a_mapped_product_has_the_epilogue_of_the_product(axes: Any) -> None:
    def f(x: jax.Array, bias: jax.Array) -> jax.Array:
        return gemm(x, W, bias=bias, activation="gelu", numerics=ROWS)

    x = X.reshape(7, 10, K) if axes[0] == 0 else X[:10]
    with target("h200"):
        (own,) = numerics.of(jax.vmap(f, axes), x, jnp.ones((7, N)))
        (alone,) = numerics.of(f, X[:10], BIAS)
    assert own == alone


def test_a_mapped_function_of_factors_with_scales_of_blocks_obeys_a_promise() -> None:
    def f(a: jax.Array, row: jax.Array) -> jax.Array:
        b, col = jnp.zeros((256, 512), a.dtype), jnp.ones((4, 2))
        scales = {"row_scale": row, "col_scale": col}
        return gemm(a, b, transpose_b=True, epilogue=jnp.square, numerics=ROWS, **scales)

    shape = jax.ShapeDtypeStruct
    given = shape((3, 256, 512), jnp.float8_e4m3fn), shape((3, 256, 4), jnp.float32)
    with target("h200"):
        (own,) = explain(jax.vmap(f), *given).products
    assert own.implementation == "hopper"


def test_a_derived_product_has_the_bits_of_the_product() -> None:
    def f(x: jax.Array) -> jax.Array:
        return gemm(x, W, bias=BIAS, activation="gelu", **SIMULATED)

    np.testing.assert_array_equal(jax.jvp(f, (X,), (X,))[0], f(X))


def test_chunks_of_rows_add_up_to_the_whole() -> None:
    x, g = draw(ROWS_OF_BATCH, 24), draw(ROWS_OF_BATCH, 40, seed=4)
    how: dict[str, Any] = {"implementation": "interpret", "preferred_element_type": jnp.float32}

    def weights(x: jax.Array, g: jax.Array) -> jax.Array:
        promised = numerics(invariant="rows", chunk=128)
        w = jnp.zeros((24, 40), jnp.bfloat16)
        f = jax.vjp(lambda w: gemm(x, w, numerics=promised, **how), w)[1]
        return f(g.astype(jnp.float32))[0]

    stated = numerics(part=128)
    whole = gemm(x, g, transpose_a=True, numerics=stated, **how)
    total = jnp.zeros_like(whole)
    for start in range(0, ROWS_OF_BATCH, 128):
        part = slice(start, start + 128)
        total += gemm(x[part], g[part], transpose_a=True, numerics=stated, **how)
    np.testing.assert_array_equal(total, whole)
    np.testing.assert_array_equal(weights(x, g), whole.astype(jnp.bfloat16))
    one = gemm(x, g, transpose_a=True, numerics=numerics(part=ROWS_OF_BATCH), **how)
    assert (np.asarray(one) != np.asarray(whole)).any()


OBEYING: dict[str, Callable[[], Any]] = {
    "gemm": lambda: gemm(X, W),
    "matmul": lambda: matmul(X, W),
    "vector": lambda: matmul(X[0], W),
    "dot_general": lambda: dot_general(X, W, (((1,), (0,)), ((), ()))),
    "grouped_gemm": lambda: grouped_gemm(X, HEADS, SIZES, activation="silu"),
    "a layer of Flax": lambda: nnx.Linear(
        K, N, param_dtype=jnp.bfloat16, dot_general=dot_general, rngs=nnx.Rngs(0)
    )(X),
    "einsum": lambda: einsum("md,df->mf", X, W),
    "einsum, columns first": lambda: einsum("md,df->fm", X, W),
    "einsum, several": lambda: einsum(
        "bsd,dhk->bhsk", X.reshape(7, 10, K), W.reshape(K, 5, N // 5)
    ),
    "gram": lambda: gram(X),
    "projections": lambda: projections(X, [W, W]),
    "ragged_dot": lambda: ragged_dot(X, HEADS, SIZES),
    "function": lambda: gemm(X, HEADS[0], epilogue=lambda s: jnp.tanh(s).astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("f", OBEYING.values(), ids=OBEYING)
def test_every_product_within_a_block_obeys_it(f: Callable[[], Any]) -> None:
    with target("h200"):
        with ROWS:
            assert {own.invariant for own in numerics.of(f)} == {"rows"}
            with numerics(invariant=None):
                assert {own.invariant for own in numerics.of(f)} <= {"run", None}
        assert {own.invariant for own in numerics.of(f)} <= {"run", None}


def test_a_block_counts_for_functions_that_were_traced_before() -> None:
    f = jax.jit(lambda x: gemm(x, W))
    x = jax.ShapeDtypeStruct((5, K), jnp.bfloat16)
    with target("h200"):
        before = numerics.of(f, x)
        with ROWS:
            assert numerics.of(f, x) != before


def test_gradients_of_rows_keep_it_and_sums_over_rows_are_kernels() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return gemm(x, w, numerics=ROWS).astype(jnp.float32).sum()

    with target("h200"):
        found = numerics.of(jax.grad(f, (0, 1)), X, W)
    assert [own.by for own in found] == ["hopper"] * 3
    assert sorted(own.invariant or "" for own in found) == ["rows", "rows", "run"]


def test_explain_and_of_show_the_same_record() -> None:
    with target("h200"):
        text = str(explain(gemm, X, W, numerics=ROWS))
        (own,) = numerics.of(gemm, X, W, numerics=ROWS)
    assert str(own) in " ".join(text.split())
    assert own.parts == (3,)


def _squares(s: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return s.astype(jnp.bfloat16), jnp.sum(s * s, -1), jax.nn.logsumexp(s, -1)


WIDER = draw(K, 320, seed=5)


def test_sums_along_rows_keep_their_bits() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return gemm(x, WIDER, epilogue=_squares, **SIMULATED)

    found = numerics.check(f, X, variants=4)
    assert found, found
    exact = _squares(jnp.matmul(X, WIDER, preferred_element_type=jnp.float32))
    whole = f(X)
    np.testing.assert_allclose(whole[1], exact[1], rtol=1e-5)
    np.testing.assert_allclose(whole[2], exact[2], rtol=1e-5)
    sizes = jnp.array([30, 0, M - 30], jnp.int32)
    grouped = grouped_gemm(X, jnp.stack([WIDER] * 3), sizes, epilogue=_squares, **SIMULATED)
    for x, y in zip(grouped, whole, strict=True):
        np.testing.assert_array_equal(x, y)


def test_sums_along_rows_are_made_alike_whatever_the_rows() -> None:
    with target("h200"):
        wanted = set()
        for m in (1, 64, 300, 4096):
            x = jax.ShapeDtypeStruct((m, 512), jnp.bfloat16)
            w = jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)
            (found,) = explain(
                lambda x, w: gemm(x, w, epilogue=_squares, numerics=ROWS), x, w
            ).products
            assert found.plan is not None
            config = found.plan.config
            assert isinstance(config, HopperConfig)
            wanted.add((config.consumer_tile[1], config.finished_columns(found.problem)))
        assert wanted == {(128, 16)}


@pytest.mark.parametrize("n", [8, 24, 64, 72, 4096])
def test_sums_along_few_columns_are_made_alike_whatever_the_rows(n: int) -> None:
    widths = set()
    for m in (1, 300, 4096):
        x = jax.ShapeDtypeStruct((m, 512), jnp.bfloat16)
        w = jax.ShapeDtypeStruct((n, 512), jnp.bfloat16)
        how: dict[str, Any] = {"transpose_b": True, "epilogue": _squares, "numerics": ROWS}
        with target("h200"):
            (found,) = explain(functools.partial(gemm, **how), x, w).products
        assert found.plan is not None
        config = found.plan.config
        assert isinstance(config, HopperConfig)
        widths.add(config.consumer_tile[1])
    assert len(widths) == 1


def _within(f: Callable[[], Any]) -> Any:
    with ROWS:
        return f()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "XLA": (lambda: gemm(X, W, numerics=ROWS, implementation="xla"), "implementation='xla'"),
    "a type": (
        lambda: gemm(X.astype(jnp.int32), W.astype(jnp.int32), numerics=ROWS),
        "no kernel takes operands of int32",
    ),
    "a precision": (
        lambda: gemm(WIDE, WIDE.T, numerics=ROWS, precision="F32_F32_F32"),
        "precision F32_F32_F32 of float32",
    ),
    "a config": (
        lambda: gemm(X, HEADS[0], numerics=ROWS, config=HopperConfig((128, 64), split_k=2)),
        "got split_k=2",
    ),
    "three operands": (
        lambda: einsum("ab,bc,cd->ad", X, W, W.T, numerics=ROWS),
        "3 operands are multiplied in an order",
    ),
    "a tile that adds up along rows in another order": (
        lambda: gemm(
            X, HEADS[0], epilogue=_squares, numerics=ROWS, config=HopperConfig((128, 256))
        ),
        "must have 64 columns where sums along rows are promised",
    ),
    "a function of XLA's": (
        lambda: gemm(X, HEADS[0], epilogue=lambda s: jnp.sort(s, -1), numerics=ROWS),
        "XLA computes the epilogue",
    ),
    "groups of a type": (
        lambda: grouped_gemm(X.astype(jnp.int32), HEADS.astype(jnp.int32), SIZES, numerics=ROWS),
        "int32",
    ),
    "a function of groups of a type": (
        lambda: grouped_gemm(
            *(X.astype(jnp.int32), HEADS.astype(jnp.int32), SIZES),
            epilogue=lambda s: s + 1,
            numerics=ROWS,
        ),
        "int32",
    ),
    "a program of others": (
        lambda: _within(lambda: pallas_gemm.accelerate(jnp.matmul)(X, W)),
        "nobody knows what their rows are",
    ),
    "a loss": (
        lambda: _within(lambda: pallas_gemm.linear_cross_entropy(X, W, jnp.zeros(M, jnp.int32))),
        "the log-sum-exp adds up along rows",
    ),
    "chunks of what a function adds up along columns": (
        lambda: gemm(
            X, HEADS[0], epilogue=lambda s: jnp.sum(s, 0), numerics=numerics("rows", chunk=64)
        ),
        "the epilogue adds up rows",
    ),
    "chunks of groups": (
        lambda: ragged_dot_general(
            X, X, SIZES, xla_groups.CONTRACTED, numerics=numerics("rows", chunk=64)
        ),
        "sums over groups have no chunks",
    ),
}


def test_every_reduction_whose_order_is_told_keeps_a_promise_beside_the_others() -> None:
    def f(x: jax.Array) -> Any:
        def function(s: jax.Array) -> Any:
            return jnp.max(s, -1), jnp.min(s, -1), jnp.sum(s, -1)

        return gemm(x, HEADS[0], epilogue=function, numerics=ROWS)

    with target("h200"):
        (own,) = numerics.of(f, X)
    assert own.invariant == "rows"


@pytest.mark.parametrize(("f", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_keep_a_promise_names_both(f: Callable[[], Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as raised:
        lowered(f)
    assert "numerics" in str(raised.value)


def test_a_cpu_keeps_no_promise_unless_a_kernel_is_simulated() -> None:
    for asked in (ROWS, numerics(invariant="run")):
        with pytest.raises(ValueError, match=r"numerics\(.* another platform .* 'interpret'|simul"):
            gemm(X, W, numerics=asked)
        with asked, pytest.raises(ValueError, match="another platform"):
            ragged_dot(X, HEADS, SIZES)
    with numerics(invariant=None):
        assert gemm(X, W).shape == (M, N)


def test_a_program_for_a_gpu_is_compiled_on_a_cpu_and_raises_an_error_where_it_runs() -> None:
    with target("h200"):
        program = jax.jit(lambda x: gemm(x, W, numerics=ROWS)).lower(X).compile()
    with pytest.raises(Exception, match="another platform"):
        jax.block_until_ready(program(X))
    assert "pallas_gemm" in lowered(lambda x: gemm(x, W, numerics=ROWS), X)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"invariant": "batch"}, ValueError, "must be 'rows', 'run' or None, got 'batch'"),
        ({"part": 0}, ValueError, "part must be at least 1, got 0"),
        ({"chunk": 1.5}, TypeError, "chunk must be an integer or None, got 1.5"),
        ({"invariant": None, "part": 64}, ValueError, "takes back every promise"),
    ],
)
def test_a_value_that_is_not_legal_is_named(fields: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        numerics(**fields)


def test_only_a_record_is_a_promise() -> None:
    with pytest.raises(TypeError, match=r"numerics must be what .* got 'rows'"):
        gemm(X, W, numerics="rows")  # type: ignore[arg-type]


def test_precompile_compiles_the_sums_that_a_problem_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_gemm.api import precompile as precompilation

    monkeypatch.setattr(precompilation, "_report", lambda *_: None)
    b = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    a = jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)
    for asked in (ROWS, numerics(part=1024)):
        with target("h200"):
            (wanted,) = explain(gemm, a, b, numerics=asked).products
        (found,) = pallas_gemm.precompile([wanted.problem], "h200")
        assert wanted.plan is not None
        assert found.config == wanted.plan.config


def test_an_exported_program_has_the_kernel_that_keeps_the_promise() -> None:
    a = jax.ShapeDtypeStruct((64, 8192), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    f = jax.jit(lambda a, b: gemm(a, b, numerics=ROWS))
    with target("h200"):
        (product,) = explain(f, a, b).products
        exported = jax.export.export(f, platforms=["cuda"])(a, b)
        with pytest.raises(ValueError, match=r"a size is a symbol"):
            jax.export.export(f, platforms=["cuda"])(
                jax.ShapeDtypeStruct(jax.export.symbolic_shape("m, 8192"), jnp.bfloat16), b
            )
    assert product.plan is not None
    assert product.plan.config.split_k == 4
    module = jax.export.deserialize(exported.serialize()).mlir_module()
    assert "pallas_gemm_hopper_join" in module or module.count("mosaic_gpu") >= 2


CARRYING: dict[str, Callable[[], Any]] = {
    "gemm": lambda: gemm(X, W),
    "gated": lambda: gated_gemm(X, HEADS[0], HEADS[1]),
    "grouped": lambda: grouped_gemm(X, HEADS, SIZES, activation="silu"),
    "function": lambda: gemm(X, HEADS[0], epilogue=lambda s: jnp.tanh(s).astype(jnp.bfloat16)),
    "function of groups": lambda: grouped_gemm(X, HEADS, SIZES, epilogue=_squares),
    "gram": lambda: gram(draw(512, 128)),
    "projections": lambda: projections(X, [W, HEADS[0]]),
}


@pytest.mark.parametrize("f", CARRYING.values(), ids=CARRYING)
def test_an_exported_program_carries_the_record(f: Callable[[], Any]) -> None:
    with target("h200"):
        for own in (ROWS, numerics(invariant="run")):
            with own:
                wanted = {str(sums) for sums in numerics.of(f)}
                exported = jax.export.export(jax.jit(f), platforms=["cuda"])()
            program = jax.export.deserialize(exported.serialize())
            assert {*numerics.carried(program)} == wanted
        free = jax.jit(f).trace().lower(lowering_platforms=("cuda",))
        assert numerics.carried(free) == ()
    with pytest.raises(TypeError, match="program must be exported or lowered by JAX, got function"):
        numerics.carried(f)


def on_mesh(f: Callable[..., Any], *specs: Any, columns: int = 64) -> Any:
    """Compiles a product of X and W whose operands are split so."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    split = [jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)) for spec in specs]
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 128), (128, columns))]
    with target("h200"):
        return jax.jit(f, in_shardings=split).lower(*shapes).compile()


def test_devices_that_add_up_their_sums_keep_no_promise() -> None:
    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm(a, b, numerics=ROWS)

    on_mesh(f, ("x", None), (None, "y"))
    # The rows are taken, and the right operand is gathered.
    on_mesh(f, ("x", None), ("x", None))
    # So is the left one, where devices would add up sums otherwise.
    free = on_mesh(gemm, (None, "x"), (None, None))
    assert "all-reduce" in free.as_text()
    assert "all-reduce" not in on_mesh(f, (None, "x"), (None, None)).as_text()
    with pytest.raises(Exception, match=r"the mesh splits what is summed over \(k along x\)"):
        on_mesh(f, (None, "x"), ("x", None))


def test_factors_with_scales_of_blocks_are_summed_up_alike_and_derived_by_none() -> None:
    k, n, own = 16384, 256, set()
    w = jax.ShapeDtypeStruct((n, k), jnp.float8_e4m3fn)
    for m in (1, 128, 4096):
        x = jax.ShapeDtypeStruct((m, k), jnp.float8_e4m3fn)
        rows = jax.ShapeDtypeStruct((m, k // 128), jnp.float32)
        columns = jax.ShapeDtypeStruct((k // 128, n // 128), jnp.float32)

        def f(x: Any, w: Any, rows: Any, columns: Any) -> jax.Array:
            how: dict[str, Any] = {"transpose_b": True, "preferred_element_type": jnp.bfloat16}
            return gemm(x, w, row_scale=rows, col_scale=columns, numerics=ROWS, **how)

        with target("h200"):
            own |= set(numerics.of(f, x, w, rows, columns))
            with pytest.raises(ValueError, match="XLA derives a product whose factors have scales"):
                jax.eval_shape(jax.grad(lambda *y: f(*y).sum(), 2), x, w, rows, columns)
    assert {sums.parts for sums in own} == {(k // 128,)}
    assert len(own) == 1


def _part_of(epilogue: Any, *specs: Any) -> Any:
    """Returns how one device computes its part of a function, and how all of it is computed."""

    def f(a: jax.Array, b: jax.Array) -> Any:
        return gemm(a, b, epilogue=epilogue, numerics=ROWS)

    with parts.noted() as noted:
        on_mesh(f, *specs, columns=128)
    (part,) = noted.found
    with target("h200"):
        whole = explain(
            f, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 128), (128, 128)))
        )
    return dispatch.decide(part.call, part.signature), whole.products[0]


def _largest(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.tanh(s).astype(jnp.bfloat16), jnp.max(s, -1)


def test_devices_compute_their_part_of_a_function_as_one_would() -> None:
    for f, b in ((_squares, (None, None)), (_largest, (None, "y"))):
        part, whole = _part_of(f, ("x", None), b)
        assert part.problem.m == 32
        assert part.problem.n == (128 if b[1] is None else 64)
        assert part.plan is not None
        own = Sums.of(part)
        assert dataclasses.replace(own, epilogue=Sums.of(whole).epilogue) == Sums.of(whole)


def test_devices_that_add_up_what_a_function_takes_or_gives_keep_no_promise() -> None:
    with pytest.raises(Exception, match=r"the mesh splits the columns .* adds up"):
        _part_of(_squares, ("x", None), (None, "y"))
    with pytest.raises(Exception, match=r"the mesh splits what is summed over \(k along x\)"):
        _part_of(_largest, (None, "x"), ("x", None))
    with pytest.raises(ValueError, match="part of it: sort"):
        _part_of(lambda s: jnp.sort(s, -1), ("x", None), (None, None))


def test_a_mesh_of_cpus_keeps_no_promise() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    a = jax.device_put(
        jnp.ones((64, 128)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )
    b = jnp.ones((128, 64))
    for f in (gemm, functools.partial(gemm, epilogue=_largest)):
        own = functools.partial(f, numerics=ROWS)
        with pytest.raises(Exception, match="another platform"):
            jax.jit(own)(a, b)
        # What is planned for a GPU is compiled, and computes nothing.
        with target("h200"):
            found = jax.tree.leaves(jax.jit(own)(a, b))
        assert all(np.isnan(np.asarray(x, np.float32)).all() for x in found)
    sizes = jnp.array([40, 24], jnp.int32)
    with target("h200"), pytest.raises(Exception, match="devices share the rows in groups"):
        jax.jit(
            lambda a: grouped_gemm(a, b[None].repeat(2, 0), sizes, epilogue=_largest, numerics=ROWS)
        )(a)


def test_a_derived_function_keeps_no_promise_on_an_explicit_mesh() -> None:
    kinds = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=kinds, devices=jax.devices()[:4])

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm(a, b, epilogue=_largest, numerics=ROWS)[1]

    with jax.set_mesh(mesh), target("h200"):
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        a, b = jax.device_put(jnp.ones((64, 128)), split), jnp.ones((128, 64))
        jax.jit(f).lower(a, b).compile()
        with pytest.raises(ValueError, match="on an explicit mesh, XLA computes a function"):
            jax.jit(jax.grad(lambda a, b: f(a, b).sum())).lower(a, b)


def test_the_kit_names_the_first_operation_that_differs() -> None:
    w = draw(96, 512, dtype=jnp.float32)

    def f(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x) * 2
        return jax.nn.relu(y / y.sum(0, keepdims=True)) @ w

    found = numerics.check(f, draw(40, 96, dtype=jnp.float32))
    assert not found
    assert found.differing > 0
    assert found.first is not None
    assert (found.first.name, found.first.is_ours) == ("reduce_sum", False)
    assert "test_numerics.py" in str(found)
    assert "made of all of them" in found.why


def test_the_kit_names_an_operation_of_ours() -> None:
    b = draw(512, 64, seed=5)

    def f(x: jax.Array) -> jax.Array:
        parts = 2 if x.shape[0] > 32 else 1
        tile = {"tile": (64, 64), "consumers": 1, "late_store": False, "store_columns": 32}
        config = HopperConfig(**tile, partial_sums=parts)
        how = {"implementation": "interpret", "config": config}
        return gemm(x, b, **how, preferred_element_type=jnp.float32)

    found = numerics.check(f, draw(40, 512), variants=3)
    assert found.first is not None
    assert found.first.is_ours


def _fused(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as a compiler would that makes some kernels by the number of rows.

    A product of a matrix with what a sum along its rows has become is one kernel with that sum,
    unless the sum or what is in between is a result, or behind a barrier.
    """

    def computed(
        jaxpr: core.Jaxpr, consts: Any, given: Any, within: Any, kept: Any
    ) -> tuple[list[Any], list[bool]]:
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, given, strict=True))
        open_ = {v for v, is_one in zip(jaxpr.invars, within, strict=True) if is_one}

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else values[v]

        for e in jaxpr.eqns:
            inputs, name = list(map(read, e.invars)), e.primitive.name
            was = [not isinstance(v, core.Literal) and v in open_ for v in e.invars]
            if name == "jit":
                inner = e.params["jaxpr"]
                outputs, still = computed(inner.jaxpr, inner.consts, inputs, was, ())
                open_ |= {v for v, is_one in zip(e.outvars, still, strict=True) if is_one}
            else:
                found: Any = e.primitive.bind(*inputs, **e.primitive.get_bind_params(e.params))
                outputs = found if e.primitive.multiple_results else [found]
                if name == "mul" and any(was) and outputs[0].shape[-1] > 1:
                    outputs = [outputs[0] * (1 + 1e-3 * outputs[0].shape[0])]
                elif name == "reduce_sum" or (any(was) and name != "optimization_barrier"):
                    open_ |= {v for v in e.outvars if v not in kept}
            values.update(zip(e.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars)), [v in open_ for v in jaxpr.outvars]

    def run(*given: Any) -> Any:
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*given)
        kept = {v for v in closed.jaxpr.outvars if not isinstance(v, core.Literal)}
        own, _ = computed(closed.jaxpr, closed.consts, given, [False] * len(given), kept)
        return jax.tree.unflatten(jax.tree.structure(shapes), own)

    return run


def _normed(x: jax.Array, keep: Callable[[Any], Any]) -> jax.Array:
    for _ in range(3):
        y = jnp.tanh(x) + 1
        x = y * jax.lax.rsqrt(keep(jnp.mean(y * y, -1, keepdims=True)) + 1e-6)
    return x


def test_the_kit_names_what_is_computed_together_with_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bits, "_compiled", _fused)
    x = draw(20, 32, dtype=jnp.float32)
    found = numerics.check(lambda x: _normed(x, lambda y: y), x, variants=4)
    assert not found
    assert found.first is not None
    assert (found.first.name, found.first.is_ours) == ("reduce_sum", False)
    assert "optimization_barrier" in found.why
    assert "up to mul at test_numerics.py" in str(found)
    assert numerics.check(lambda x: _normed(x, jax.lax.optimization_barrier), x, variants=4)


@pytest.mark.parametrize("by_products", [True, False])
def test_a_transformer_keeps_its_rows_where_kernels_make_its_sums(by_products: bool) -> None:
    net = Transformer(64, heads=2, hidden=64, options=SIMULATED, by_products=by_products)
    weights, x = net.weights(), draw(3, 8, 64)
    run = _fused(lambda x: net(x, weights))
    differ = (np.asarray(run(x[1:2])) != np.asarray(run(x)[1:2])).any()
    assert differ == (not by_products)


def test_the_kit_names_the_last_of_several_where_no_reduction_is_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            names = [e.primitive.name for e in jax.make_jaxpr(f)(*given).jaxpr.eqns]
            results = f(*given)
            is_one = len(results) == 1 and {"tanh", "exp"} <= {*names}
            return [results[0] + given[0].shape[0]] if is_one else results

        return run

    monkeypatch.setattr(bits, "_compiled", compiled)
    x = draw(20, 32, dtype=jnp.float32)
    found = numerics.check(lambda x: jnp.sin(jnp.exp(jnp.tanh(x)) * 2), x, variants=3)
    assert found.first is not None
    assert found.first.name == "exp"
    assert "in one kernel" in found.why


def test_the_kit_follows_rows_through_reshapes_and_scans() -> None:
    def f(x: jax.Array) -> jax.Array:
        y = x.reshape(-1, 4).swapaxes(0, 1)
        return jax.lax.scan(lambda c, r: (c + r, c), jnp.zeros(y.shape[1]), y)[1].reshape(4, -1).T

    x = draw(12, 8, dtype=jnp.float32)
    assert numerics.check(lambda x: f(x).reshape(x.shape[0], -1), x)
    with pytest.raises(ValueError, match="same number of them first"):
        numerics.check(jnp.add, x, x[:3], rows=(0, 1))
    for rows in ((2,), (-1, 0)):
        with pytest.raises(ValueError, match="rows must name arguments, of which there are 2, got"):
            numerics.check(jnp.add, x, x, rows=rows)
    with pytest.raises(TypeError, match="f must be a function"):
        numerics.check(x, x)
