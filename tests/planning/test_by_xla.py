"""What XLA computes in the place of a kernel, beside NumPy: small integers, so all is exact."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm.call import Call, GroupedCall, Operands
from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.planning.by_xla import xla, xla_groups, xla_program
from pallas_gemm.problem import Epilogue
from pallas_gemm.program import Constant, Operand, Program, Result, Step

F32, BF16, F16, F64 = map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16, np.float64))
INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)
M, N, K, BATCH = 2, 3, 4, 5
SIZES = {"m": M, "n": N, "k": K}
DEFAULT, HIGHEST = lax.Precision.DEFAULT, lax.Precision.HIGHEST


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    rng = np.random.default_rng([seed, *shape])
    return np.asarray(rng.integers(-4, 5, shape)).astype(dtype)


def computed(f: Any, call: Call, *operands: Any) -> jax.Array:
    """Computes a call in one program: it compiles sooner than its parts."""
    return jax.jit(functools.partial(f, call))(*operands)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def product(a: Any, b: Any, call: Call) -> np.ndarray:
    left, right = wide(a), wide(b)
    left = np.swapaxes(left, -1, -2) if call.transpose_a else left
    return left @ (np.swapaxes(right, -1, -2) if call.transpose_b else right)


def exactly(found: jax.Array, expected: np.ndarray, dtype: Any = F32) -> None:
    assert found.dtype == dtype
    np.testing.assert_array_equal(wide(found), expected)


def factors(call: Call, batch: str = "", dtype: Any = F32) -> tuple[jax.Array, jax.Array]:
    """Returns both operands; those that are named are a batch."""
    shapes = ((K, M) if call.transpose_a else (M, K), (N, K) if call.transpose_b else (K, N))
    lead = [(BATCH,) * (name in batch) for name in "ab"]
    a, b = (numbers(*x, *shape, dtype=dtype) for x, shape in zip(lead, shapes, strict=True))
    return a, b


@pytest.mark.parametrize("batch", ["", "a", "b", "ab"])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_operands_are_stored_either_way_and_shared(layout: str, batch: str) -> None:
    call = Call(F32, layout[0] == "T", layout[1] == "T")
    a, b = factors(call, batch)
    exactly(computed(xla.product, call, a, b), product(a, b, call))


@pytest.mark.parametrize("batch", ["", "b"])
def test_a_precision_stays_with_its_operand(batch: str) -> None:
    call = Call(F32, precision=(DEFAULT, HIGHEST))
    a, b = factors(call, batch)
    [dot] = [
        each
        for each in jax.make_jaxpr(lambda *x: xla.product(call, *x))(a, b).eqns
        if each.primitive is lax.dot_general_p
    ]
    left: Any = dot.invars[0].aval
    first = left.shape == a.shape
    assert dot.params["precision"] == ((DEFAULT, HIGHEST) if first else (HIGHEST, DEFAULT))


VECTORS = {"bias": (N,), "row_scale": (M,), "col_scale": (N,), "residual": (M, N)}


@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(alpha=3.0),
        Epilogue(alpha=None),
        Epilogue(bias=True),
        Epilogue(row_scale=True),
        Epilogue(col_scale=True, bias=True, alpha=-2.0),
        Epilogue(residual=True),
        Epilogue(residual=True, beta=3.0),
        Epilogue(residual=True, beta=None, bias=True),
        Epilogue(activation=jnp.square, residual=True, bias=True),
        Epilogue(gated=True),
        Epilogue(gated=True, alpha=2.0, activation=jnp.square, bias=True, up_bias=True),
        Epilogue(gated=True, row_scale=True, col_scale=True, up_scale=True, residual=True),
    ],
    ids=lambda own: " ".join(own.parts),
)
def test_an_epilogue_is_its_formula(epilogue: Epilogue) -> None:
    call = Call(F32, epilogue=epilogue)
    a, b = factors(call, "ab")
    shapes = VECTORS | {"alpha": (), "beta": (), "up_scale": (N,), "up_bias": (N,)}
    given = {name: numbers(*shapes[name], seed=7) for name in epilogue.operands}
    given |= {name: numbers(seed=3) * 0 + 3 for name in given if not shapes[name]}
    up = numbers(*b.shape, seed=2)
    own = Operands(a, b, up if epilogue.gated else None, **given)
    alpha = 3.0 if epilogue.alpha is None else epilogue.alpha
    beta = 3.0 if epilogue.beta is None else epilogue.beta

    def value(right: Any, scale: str, bias: str) -> np.ndarray:
        total = alpha * product(a, right, call)
        total = total * wide(given.get("row_scale", np.ones(M)))[:, None]
        return total * wide(given.get(scale, np.ones(N))) + wide(given.get(bias, np.zeros(N)))

    expected = value(b, "col_scale", "bias")
    expected = expected**2 if epilogue.activation else expected
    expected = expected * value(up, "up_scale", "up_bias") if epilogue.gated else expected
    expected = expected + beta * wide(given.get("residual", np.zeros((M, N))))
    exactly(computed(xla.product, call, *own.present()), expected)


@pytest.mark.parametrize(
    ("name", "shape", "ndim", "found"),
    [
        ("bias", (N,), 2, (1, N)),
        ("bias", (N,), 3, (1, 1, N)),
        ("bias", (BATCH, N), 3, (BATCH, 1, N)),
        ("bias", (N,), 1, (N,)),
        ("row_scale", (M,), 2, (M, 1)),
        ("row_scale", (BATCH, M), 3, (BATCH, M, 1)),
        ("row_scale", (M,), 3, (1, M, 1)),
        ("alpha", (), 2, (1, 1)),
        ("alpha", (), 1, (1,)),
        ("alpha", (BATCH,), 3, (BATCH, 1, 1)),
        ("residual", (M, N), 2, (M, N)),
        ("residual", (M, N), 3, (1, M, N)),
    ],
)
def test_operands_get_the_dimensions_of_the_result(
    name: str, shape: tuple[int, ...], ndim: int, found: tuple[int, ...]
) -> None:
    assert xla.aligned(name, jnp.zeros(shape), ndim).shape == found


@pytest.mark.parametrize(
    ("types", "blocks", "found"),
    [
        ((BF16, BF16, BF16), False, F32),
        ((INT8, INT8, INT32), False, INT32),
        ((INT8, INT8, F32), True, F32),
        ((BF16, INT8, BF16), False, F32),
        ((INT8, BF16, BF16), False, F32),
        ((F64, F32, F32), False, F64),
        ((F32, F64, F32), False, F64),
        ((F32, F32, F64), False, F64),
    ],
)
def test_sums_are_kept_in_a_wide_type(types: Any, blocks: bool, found: Any) -> None:
    assert xla.wide_dtype(*types, blocks=blocks) == found


def test_integers_are_added_up_as_integers() -> None:
    a = jnp.full((1, 2**11), 127, jnp.int8).at[0, 0].set(126)
    b = jnp.full((2**11, 1), 127, jnp.int8)
    # More than float32 holds.
    exactly(computed(xla.product, Call(INT32), a, b), product(a, b, Call(INT32)), INT32)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(row_blocks=True),
        Epilogue(col_blocks=True),
        Epilogue(col_blocks=True, col_zeros=True, bias=True),
        Epilogue(row_blocks=True, col_blocks=True, up_blocks=True, gated=True),
        Epilogue(col_blocks=True, col_zeros=True, up_blocks=True, up_zeros=True, gated=True),
    ],
    ids=lambda own: " ".join(own.parts),
)
def test_blocks_are_scaled(layout: str, epilogue: Epilogue) -> None:
    call = Call(F32, layout[0] == "T", layout[1] == "T", epilogue)
    a, b = factors(call)
    # Two blocks of k; each row, and all columns, have one.
    shapes = {"row_blocks": (M, 2), "bias": (N,)}
    given = {
        name: numbers(*shapes.get(name, (2, 1)), seed=seed)
        for seed, name in enumerate(epilogue.operands)
    }
    up = numbers(*b.shape, seed=2)
    found = computed(
        xla.product, call, *Operands(a, b, up if epilogue.gated else None, **given).present()
    )

    def scaled(x: Any, turned: bool, scale: str, zeros: str = "") -> np.ndarray:
        whole = wide(x).T if turned else wide(x)
        block = np.ones((1, K // 2) if scale == "row_blocks" else (K // 2, N))
        own = {name: np.kron(wide(given[name]), block) for name in (scale, zeros) if name in given}
        return (whole - own.get(zeros, 0)) * own.get(scale, 1)

    left = scaled(a, call.transpose_a, "row_blocks")
    sums = left @ scaled(b, call.transpose_b, "col_blocks", "col_zeros")
    if epilogue.gated:
        sums = sums * (left @ scaled(up, call.transpose_b, "up_blocks", "up_zeros"))
    exactly(found, sums + wide(given.get("bias", np.zeros(N))))


def test_scaled_factors_are_rounded_as_tensor_cores_read_them_where_the_result_is_short() -> None:
    # One has as many bits as tf32, which has 10 after the first, and the other one more.
    fine = jnp.asarray([[1 + 2.0**-10, 1 + 2.0**-11]], jnp.float32)
    one = jnp.ones((2, 1), jnp.float32)
    own = Epilogue(col_blocks=True)
    for out, precision, kept in (
        (F32, (DEFAULT, DEFAULT), True),
        (BF16, (DEFAULT, DEFAULT), False),
        (BF16, (HIGHEST, DEFAULT), True),
        (BF16, lax.DotAlgorithmPreset.F32_F32_F32, True),
    ):
        call = Call(out, epilogue=own, precision=precision)
        ready, given = xla.scaled_factors(call, Operands(fine, one), lambda _, value, __: value)
        assert (given.a == fine)[0].tolist() == [True, kept]
        assert ready.precision == ((HIGHEST,) * 2 if kept else precision)
        assert not ready.epilogue.blocks


def test_weights_beside_16_bits_are_rounded_to_the_type_of_the_rows() -> None:
    a, b = numbers(M, K, dtype=BF16), numbers(K, N, dtype=jnp.int8)
    scale = jnp.full((1, N), 1 + 2.0**-12, jnp.float32)
    call = Call(F32, epilogue=Epilogue(col_blocks=True), precision=(DEFAULT, DEFAULT))
    exactly(computed(xla.product, call, a, b, scale), product(a, b, call))
    _, given = xla.without_blocks(call, Operands(a, b, col_blocks=scale))
    assert (given.a.dtype, given.b.dtype) == (BF16, BF16)
    # With scales of rows both factors are scaled in float32.
    both = dataclasses.replace(call, epilogue=Epilogue(row_blocks=True, col_blocks=True))
    rows = jnp.ones((M, 1), jnp.float32)
    _, given = xla.without_blocks(both, Operands(a, b, row_blocks=rows, col_blocks=scale))
    assert (given.a.dtype, given.b.dtype) == (F32, F32)
    exactly(
        computed(xla.product, both, a, b, rows, scale),
        product(a, b, call) * float(np.float32(1 + 2.0**-12)),
    )


@pytest.mark.parametrize("kind", [jnp.int8, jnp.int4])
def test_weights_of_few_bits_get_the_type_of_the_rows(kind: Any) -> None:
    a, b, up = numbers(M, K, dtype=BF16), numbers(K, N, dtype=kind), numbers(K, N, seed=2)
    given = xla.widened(Operands(a, b, up.astype(kind)))
    assert (given.a.dtype, given.b.dtype, given.up.dtype) == (BF16, BF16, BF16)
    assert xla.widened(Operands(a, b)).up is None
    call = Call(F32, epilogue=Epilogue(gated=True))
    found = computed(xla.product, call, a, b, up.astype(kind))
    exactly(found, product(a, b, call) * product(a, up, call))
    same = Operands(a, a)
    assert xla.widened(same) is same


GROUPS = {
    "some": (3, 0, 5, 2),
    "too few rows": (1, 0, 2),
    "too many rows": (4, 9, 2),
    "none": (),
}
"""Sizes of groups of ten rows."""
WAYS = {"tiles": xla_groups.by_tiles, "jax": xla_groups.by_jax}


def of_group(sizes: tuple[int, ...], rows: int) -> list[slice]:
    ends = np.minimum(np.cumsum(sizes), rows).astype(int)
    return [slice(first, end) for first, end in zip((0, *ends), ends, strict=False)]


@pytest.mark.parametrize(
    ("way", "name", "turned"),
    [*(("tiles", name, False) for name in GROUPS), ("jax", "some", False)]
    + [(way, "too few rows", True) for way in WAYS],
)
def test_rows_are_multiplied_by_the_matrix_of_their_group(
    way: str, name: str, turned: bool
) -> None:
    sizes = GROUPS[name]
    call, groups = GroupedCall(F32, transpose_b=turned), len(sizes)
    a = numbers(10, K)
    b = numbers(groups, N, K) if turned else numbers(groups, K, N)
    expected = np.zeros((10, N))
    for group, rows in enumerate(of_group(sizes, 10)):
        expected[rows] = product(a[rows], b[group], call)
    exactly(computed(WAYS[way], call, a, b, jnp.asarray(sizes, jnp.int32)), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [GROUPS["some"], GROUPS["too few rows"]], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_sums_over_groups_are_of_their_rows_alone(
    way: str, sizes: tuple[int, ...], last: bool
) -> None:
    call = GroupedCall(F32, not last, last, contracted=True)
    a, b = numbers(10, M), numbers(10, N, seed=1)
    each = [wide(a[rows]).T @ wide(b[rows]) for rows in of_group(sizes, 10)]
    given = (a.T, b.T) if last else (a, b)
    exactly(computed(WAYS[way], call, *given, jnp.asarray(sizes, jnp.int32)), np.stack(each))


@pytest.mark.parametrize("sizes", [(130, 0, 300, 1, 69), (128, 128, 128, 116)], ids=str)
@pytest.mark.parametrize("contracted", [False, True])
def test_groups_of_more_rows_than_a_tile(sizes: tuple[int, ...], contracted: bool) -> None:
    a, groups = numbers(500, K), len(sizes)
    b = numbers(500, N, seed=1) if contracted else numbers(groups, K, N)
    call = GroupedCall(F32, contracted, contracted=contracted)
    each = [
        wide(a[rows]).T @ wide(b[rows]) if contracted else wide(a[rows]) @ wide(b[group])
        for group, rows in enumerate(of_group(sizes, 500))
    ]
    expected = np.stack(each) if contracted else np.concatenate(each)
    exactly(computed(xla_groups.by_tiles, call, a, b, jnp.asarray(sizes, jnp.int32)), expected)


@pytest.mark.parametrize(
    ("groups", "height"),
    # About as many rows as a group has, in steps of 128; all rows where there are fewer.
    [(1, 1024), (4, 640), (8, 384), (40, 128), (2, 1024)],
)
def test_tiles_are_about_as_high_as_groups(groups: int, height: int) -> None:
    rows = 2500
    shapes = (
        jax.ShapeDtypeStruct((rows, K), F32),
        jax.ShapeDtypeStruct((groups, K, N), F32),
        jax.ShapeDtypeStruct((groups,), INT32),
    )
    program = jax.make_jaxpr(lambda *x: xla_groups.by_tiles(GroupedCall(F32), *x))(*shapes)
    [loop] = [each for each in program.eqns if each.primitive.name in ("while", "scan")]
    inner = loop.params.get("jaxpr", loop.params.get("body_jaxpr")).jaxpr
    [dot] = [each for each in inner.eqns if each.primitive is lax.dot_general_p]
    assert dot.invars[0].aval.shape == (height, K)
    # Each group may begin and end within a tile.
    assert f"{(rows + (height - 1) * groups) // height}" in str(loop)


def test_a_group_has_a_bias_and_a_scale_of_its_own() -> None:
    sizes, a, b = (3, 0, 5), numbers(10, K), numbers(3, K, N)
    own = {"bias": numbers(3, N, seed=3), "row_scale": numbers(10, seed=4)}
    own |= {"alpha": numbers(3, seed=5), "col_scale": numbers(N, seed=6)}
    epilogue = Epilogue(alpha=None, bias=True, row_scale=True, col_scale=True)
    call = GroupedCall(F32, epilogue=epilogue)
    counts = jnp.asarray(sizes, jnp.int32)
    extras = [own[name] for name in epilogue.operands]
    expected = np.zeros((10, N))
    for group, rows in enumerate(of_group(sizes, 10)):
        scale = wide(own["alpha"])[group] * wide(own["row_scale"])[rows, None]
        total = wide(a[rows]) @ wide(b[group]) * scale * wide(own["col_scale"])
        expected[rows] = total + wide(own["bias"])[group]
    exactly(computed(xla_groups.by_tiles, call, a, b, counts, *extras), expected)
    none = xla_groups.by_tiles(
        GroupedCall(BF16, epilogue=Epilogue(bias=True)),
        *(a, b[:0], counts[:0], own["bias"][:0]),
    )
    exactly(none, np.zeros((10, N)), BF16)


def test_gated_groups_and_those_of_weights_with_scales() -> None:
    sizes, a, b, up = (3, 0, 5), numbers(10, K), numbers(3, K, N), numbers(3, K, N, seed=2)
    counts = jnp.asarray(sizes, jnp.int32)
    gated, both = np.zeros((10, N)), np.zeros((10, N))
    scale = numbers(3, 2, N, seed=5)
    for group, rows in enumerate(of_group(sizes, 10)):
        gated[rows] = product(a[rows], b[group], Call(F32)) * product(a[rows], up[group], Call(F32))
        scaled = wide(b[group]) * np.repeat(wide(scale[group]), K // 2, 0)
        both[rows] = wide(a[rows]) @ scaled
    call = GroupedCall(F32, epilogue=Epilogue(gated=True))
    exactly(computed(xla_groups.by_tiles, call, a, b, up, counts), gated)
    # Products may be kept in another type.
    finished = functools.partial(xla_groups.finished, dtype=BF16)
    short = jax.jit(lambda *x: finished(call, xla_groups._by_tiles, *x))(a, b, up, counts)
    each = [
        np.concatenate([product(a[rows], x[group], call) for group, rows in enumerate(own)])
        for x in (b, up)
        if (own := of_group(sizes, 10))
    ]
    rounded = [wide(jnp.asarray(x, BF16)) for x in each]
    exactly(short[:8], rounded[0] * rounded[1])
    call = GroupedCall(F32, epilogue=Epilogue(col_blocks=True))
    few = b.astype(jnp.int8), counts, scale
    exactly(computed(xla_groups.by_tiles, call, a.astype(BF16), *few), both)
    alone = GroupedCall(F32)
    _, given = xla_groups.as_matrices(alone, a.astype(BF16), b.astype(jnp.int8), counts)
    assert [x.dtype for x in given] == [BF16, BF16, INT32]
    few_bits = computed(xla_groups.by_tiles, alone, a.astype(BF16), b.astype(jnp.int8), counts)
    each = wide(a[:3]) @ wide(b[0]), wide(a[3:8]) @ wide(b[2]), np.zeros((2, N))
    exactly(few_bits, np.concatenate(each))


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((3, 0, 2), [0, 0, 0, 2, 2, 3]),
        ((0, 6), [1] * 6),
        ((9, 1), [0] * 6),
        ((-1, 2, 1), [1, 1, 2, 3, 3, 3]),
    ],
)
def test_each_row_is_in_a_group(sizes: tuple[int, ...], found: list[int]) -> None:
    of_rows = jax.jit(functools.partial(xla_groups.group_of_rows, rows=6))
    assert of_rows(np.asarray(sizes, np.int32)).tolist() == found


def test_what_a_row_takes_of_its_group_changes_with_it() -> None:
    x, group = numbers(3, N), jnp.asarray([2, 0, 2, 1], jnp.int32)
    found, change = jax.jvp(lambda x: xla_groups.taken(x, group), (x,), (2 * x,))
    exactly(found, wide(x)[np.asarray(group)])
    exactly(change, 2 * wide(x)[np.asarray(group)])
    back = jax.vjp(lambda x: xla_groups.taken(x, group), x)[1](jnp.ones((4, N)))[0]
    exactly(back, np.array([[1.0] * N, [1.0] * N, [2.0] * N]))


REDUCED: dict[tuple[str, str], Any] = {
    ("mn", ""): lambda x: x,
    ("m", "sum"): lambda x: x.sum(-1),
    ("n", "sum"): lambda x: x.sum((-3, -2)),
    ("m", "max"): lambda x: x.max(-1),
    ("n", "min"): lambda x: x.min((-3, -2)),
    ("m", "logsumexp"): lambda x: (x.max(-1), np.exp(x - x.max(-1, keepdims=True)).sum(-1)),
}


@pytest.mark.parametrize(("kind", "reduction"), REDUCED, ids=str)
@pytest.mark.parametrize("batch", ["", "b"])
def test_a_program_runs_on_whole_arrays(kind: str, reduction: str, batch: str) -> None:
    # The rows of a matrix are two dimensions of an array.
    names, shape = Names(f"{batch}hij", "hi", "j"), (5, 2, 3, 4)[not batch :]
    total, own = numbers(*shape), numbers(shape[-3], shape[-1], seed=1)
    times = Step(lax.mul_p, (), (0, Constant(3.0, F32)))
    plus = Step(lax.add_p, (), (2, 1))
    results = (Result(3, F32, kind, reduction),)
    program = Program(1, F32, (Operand("mn", F32),), (times, plus), results)
    [found] = jax.jit(lambda x, y: xla_program.run(program, names, [x], [(y, "hj")]))(total, own)
    expected = REDUCED[kind, reduction](3 * wide(total) + wide(own)[:, None])
    np.testing.assert_allclose(wide(found), np.stack(expected), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, jnp.bool_])
def test_a_program_reads_words_that_are_not_zero_as_true(dtype: Any) -> None:
    chosen = jnp.asarray([[2, 0, 1]], jnp.int8).astype(dtype)
    operand = Operand("mn", np.dtype(np.bool_))
    step = Step(lax.select_n_p, (), (1, Constant(0.0, F32), 0))
    program = Program(1, F32, (operand,), (step,), (Result(2, F32),))
    total = jnp.asarray([[5, 6, 7]], jnp.bfloat16)
    [found] = xla_program.run(program, Names("ij", "i", "j"), [total], [(chosen, "ij")])
    exactly(found, np.array([[5.0, 0, 7]]))
