"""Bad input: an error before anything is traced, that names the argument, its value and the way."""

import fractions
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import (
    IgnoredWarning,
    PromotedWarning,
    dot_general,
    einsum,
    explain,
    gated_gemm,
    gemm,
    grouped_gemm,
    matmul,
    projections,
    ragged_dot,
    target,
)
from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.op.product import product_p
from schedules import build

A, B = jnp.ones((4, 6)), jnp.ones((6, 8))
NUMBERS = (((1,), (0,)), ((), ()))


def _mixed(dtype: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return gemm(A, B.astype(dtype), implementation="hopper")


def _scaled(config: HopperConfig) -> Any:
    a, one = jnp.ones((512, 128), jnp.bfloat16), jnp.float32(1)
    rest = jnp.ones((512, 512), jnp.bfloat16)
    return gemm(
        *(a, a),
        transpose_b=True,
        alpha=one,
        beta=one,
        col_scale=rest[0],
        residual=rest,
        activation="gelu",
        config=config,
    )


CASES: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("no array", lambda: gemm([[1.0]], B), TypeError, "a must be an array, got list"),
    ("none", lambda: gemm(A, None), TypeError, "b must be an array, got NoneType"),
    ("keys", lambda: gemm(jax.random.key(0), B), TypeError, "a must be .* numbers, got dtype key"),
    (
        "a number beyond int32",
        lambda: gemm(A, B, bias=2**40),
        TypeError,
        "bias must be an array of numbers of a type that JAX has, got 1099511627776",
    ),
    (
        "a fraction",
        lambda: gemm(A, B, residual=fractions.Fraction(1, 2)),
        TypeError,
        r"residual must be an array of numbers .* got Fraction\(1, 2\)",
    ),
    (
        "a list as a sharding",
        lambda: gemm(A, B, out_sharding=["x", None]),
        TypeError,
        r"out_sharding must be a NamedSharding or a PartitionSpec, got \['x', None\]",
    ),
    (
        "a type that is a number",
        # JAX has seen an equal one that is of a type.
        lambda: gemm(
            *(A, B),
            preferred_element_type=jax.dtypes.canonicalize_dtype(np.float32(1)) and True,
        ),
        TypeError,
        "preferred_element_type=True is no type of numbers",
    ),
    (
        "an array as an implementation",
        lambda: gemm(A, B, implementation=np.ones(2)),
        ValueError,
        "implementation=array.* is unknown",
    ),
    ("a Python number", lambda: gemm(2.0, B), ValueError, "a must have at least one dim"),
    ("a scalar", lambda: gemm(jnp.float32(1), B), ValueError, "a must have at least one dim"),
    (
        "contracted sizes",
        lambda: gemm(A, A),
        TypeError,
        r"contracted size, got 6 in a\[4, 6\] .* and 4 in b\[4, 6\].*transpose_b=True would fit",
    ),
    (
        "a transposition too many",
        lambda: gemm(A, B, transpose_a=True),
        TypeError,
        "transpose_a=False would fit",
    ),
    (
        "no transposition helps",
        lambda: gemm(A, jnp.ones((5, 7))),
        TypeError,
        r"with transpose_a=False, transpose_b=False$",
    ),
    (
        "vectors",
        lambda: gemm(jnp.ones(3), jnp.ones(4)),
        TypeError,
        r"got 3 in a\[3\] .* and 4 in b\[4\]",
    ),
    (
        "batches",
        lambda: gemm(jnp.ones((2, 4, 6)), jnp.ones((3, 6, 8))),
        ValueError,
        r"a\[2, 4, 6\] and b\[3, 6, 8\] must broadcast: \[2\] against \[3\]",
    ),
    ("bias", lambda: gemm(A, B, bias=jnp.ones(6)), ValueError, r"bias .* \[8\], got \[6\]"),
    (
        "bias of two dimensions",
        lambda: gemm(A, B, bias=jnp.ones((2, 8))),
        ValueError,
        r"bias .* got \[2, 8\]",
    ),
    (
        "bias of a vector",
        lambda: gemm(A, jnp.ones(6), bias=jnp.ones(1)),
        ValueError,
        "bias needs a result with columns, but b is a vector",
    ),
    (
        "residual",
        lambda: gemm(A, B, residual=jnp.ones((4,))),
        ValueError,
        r"residual must have the result's shape \[4, 8\], or broadcast to it, got \[4\]",
    ),
    (
        "activation's name",
        lambda: gemm(A, B, activation="geluu"),
        ValueError,
        "activation='geluu' is unknown; did you mean 'gelu'",
    ),
    ("activation's kind", lambda: gemm(A, B, activation=3), TypeError, "activation must be a name"),
    (
        "activation that mixes",
        lambda: gemm(A, B, activation=jax.nn.softmax),
        TypeError,
        "must be elementwise, but it uses reduce_max",
    ),
    (
        "activation that captures",
        lambda: gemm(A, B, activation=lambda x: x * B[0, 0]),
        TypeError,
        r"captures arrays of shapes \[6, 8\]; only Python numbers",
    ),
    (
        "activation that captures a matrix",
        lambda: gemm(A, B, activation=lambda x: x * B),
        TypeError,
        r"captures arrays of shapes \[6, 8\]; only Python numbers",
    ),
    (
        "activation of NumPy",
        lambda: gemm(A, B, activation=np.tanh),
        TypeError,
        r"ufunc 'tanh'> computes with NumPy, .* such as jnp.tanh for np.tanh$",
    ),
    (
        "activation that changes the type",
        lambda: gemm(A, B, activation=lambda x: x.astype(jnp.bfloat16)),
        TypeError,
        r"turns float32\[2, 3\] into bfloat16\[2,3\]",
    ),
    (
        "activation of a tuple",
        lambda: gemm(A, B, activation=lambda x: (x,)),
        TypeError,
        r"turns float32\[2, 3\] into a tuple of float32\[2,3\]",
    ),
    (
        "activation of two arguments",
        lambda: gemm(A, B, activation=jnp.add),
        TypeError,
        r"activation=.* of one float32 array .* raised TypeError: add\(\) missing 1",
    ),
    (
        "activation that looks at values",
        lambda: gemm(A, B, activation=lambda x: x if x > 0 else -x),
        TypeError,
        "activation=.* tracing it raised",
    ),
    ("objects", lambda: gemm(A, np.asarray([[{}]])), TypeError, "b must .* got dtype object"),
    (
        "a flag",
        lambda: gemm(A, B, transpose_a="no"),
        TypeError,
        "transpose_a must be True or False",
    ),
    ("a large alpha", lambda: gemm(A, B, alpha=10**400), ValueError, "alpha must fit into a float"),
    (
        "a complex alpha of NumPy",
        lambda: gemm(A, B, alpha=np.complex64(2 + 1j)),
        TypeError,
        "alpha must be of a floating-point type, such as float32, got dtype complex64",
    ),
    (
        "a complex bias",
        lambda: gemm(A, B, bias=jnp.ones(8, jnp.complex64)),
        TypeError,
        "bias must be an array of real numbers, got dtype complex64",
    ),
    (
        "a complex residual",
        lambda: gemm(A, B, residual=jnp.ones((4, 8), jnp.complex64)),
        TypeError,
        "residual must be an array of real numbers",
    ),
    (
        "no second weight",
        lambda: gated_gemm(A, B, None),
        TypeError,
        "w_up must be an array, got",
    ),
    (
        "weights that are vectors",
        lambda: gated_gemm(A, A[0], A[0]),
        ValueError,
        r"w_gate must be a matrix or several, got shape \[6\]",
    ),
    (
        "the name of the first weight",
        lambda: gated_gemm(A, A, A),
        TypeError,
        r"a and w_gate must agree .* in w_gate\[4, 6\].*transpose_b=True would fit",
    ),
    (
        "a config's field",
        lambda: gemm(A, B, config=HopperConfig(stages="many")),
        TypeError,
        "stages must be an integer or None, got 'many'",
    ),
    (
        "a config's tile",
        lambda: gemm(A, B, config=HopperConfig(tile=(64, 64, 64))),
        TypeError,
        r"tile must be a pair of integers such as \(2, 1\), got \(64, 64, 64\)",
    ),
    (
        "dimension numbers that are none",
        lambda: dot_general(A, B, (((1.5,), (0,)), ((), ()))),
        TypeError,
        "dimension_numbers must be .* sequences of integers",
    ),
    (
        "target",
        lambda: target(3).__enter__(),
        ValueError,
        "device=3 is unknown; .*legal: b200.*h100",
    ),
    (
        "activation of nothing",
        lambda: gemm(A, B, activation=lambda _: None),
        TypeError,
        r"it turns float32\[2, 3\] into nothing",
    ),
    ("beta", lambda: gemm(A, B, beta="1"), TypeError, "beta must be a number, .*got str: '1'"),
    (
        "alpha of one dimension",
        lambda: gemm(A, B, alpha=jnp.ones(1)),
        ValueError,
        r"alpha must be a number or an array of shape \[\], got \[1\]",
    ),
    (
        "alpha of integers",
        lambda: gemm(A, B, alpha=jnp.int32(2)),
        TypeError,
        "alpha must be of a floating-point type, such as float32, got dtype int32",
    ),
    (
        "a scale of integers",
        lambda: gemm(A, B, col_scale=jnp.ones(8, jnp.int8)),
        TypeError,
        "col_scale must be of a floating-point type, such as float32, got dtype int8",
    ),
    (
        "a scale of the wrong length",
        lambda: gemm(A, B, row_scale=jnp.ones(5)),
        ValueError,
        r"row_scale must have one value per row of the result, shape \[4\], got \[5\]",
    ),
    (
        "a scale on the wrong side",
        lambda: gemm(A, B, row_scale=jnp.ones(8)),
        ValueError,
        r"row_scale .* \[4\], got \[8\]; col_scale would fit",
    ),
    (
        "a scale of a vector",
        lambda: gemm(A, jnp.ones(6), row_scale=jnp.ones(4)),
        ValueError,
        "row_scale needs a result with rows, but b is a vector",
    ),
    (
        "a scale of as many products",
        lambda: gemm(jnp.ones((3, 4, 6)), B, col_scale=jnp.ones((2, 8))),
        ValueError,
        r"col_scale .* shape \[8\] or \[3, 8\], got \[2, 8\]",
    ),
    (
        "the name of a gate's bias",
        lambda: gated_gemm(A, B, B, gate_bias=jnp.ones(4)),
        ValueError,
        r"gate_bias must have one value per column of the result, shape \[8\], got \[4\]",
    ),
    (
        "a scaled result of integers",
        lambda: gemm(A.astype(jnp.int8), B.astype(jnp.int8), row_scale=jnp.ones(4)),
        TypeError,
        "scales, .* need .* preferred_element_type=jnp.float32 would be legal$",
    ),
    (
        "preferred type",
        lambda: gemm(A, B, preferred_element_type="float31"),
        TypeError,
        "preferred_element_type='float31' is no type of numbers",
    ),
    (
        "preferred type of no numbers",
        lambda: matmul(A, B, preferred_element_type=object),
        TypeError,
        "preferred_element_type=<class 'object'> is no type of numbers",
    ),
    (
        "preferred type that is narrower",
        lambda: matmul(A.astype(int), B.astype(int), preferred_element_type=jnp.int8),
        TypeError,
        "`preferred_element_type` must not be narrower",
    ),
    (
        "an epilogue of integers",
        lambda: gemm(jnp.ones((4, 6), jnp.int8), jnp.ones((6, 8), jnp.int8), activation="relu"),
        TypeError,
        "need real operands and a floating-point result",
    ),
    (
        "precision",
        lambda: gemm(A, B, precision="exact"),
        ValueError,
        "precision='exact' is not legal",
    ),
    (
        "implementation",
        lambda: gemm(A, B, implementation="hoper"),
        ValueError,
        "implementation='hoper' is unknown; did you mean 'hopper'",
    ),
    (
        "implementation for the type",
        lambda: gemm(A.astype(jnp.complex64), B.astype(jnp.complex64), implementation="interpret"),
        ValueError,
        "implementation='interpret' cannot .* no kernel takes operands of complex64",
    ),
    (
        "weights that JAX promotes to nothing",
        lambda: gemm(A, B.astype(jnp.int2), col_scale=jnp.ones(8)),
        ValueError,
        "^a and b must have types that JAX promotes to one, got float32 and int2: cast one of them,"
        " or scale b if it is one of float4_e2m1fn, .*, int4, .*; JAX says: Input dtypes",
    ),
    (
        "the name of such a gate",
        lambda: gated_gemm(A, B.astype(jnp.int4), B.astype(jnp.int4)),
        ValueError,
        "^a and w_gate must have .* or scale w_gate if",
    ),
    (
        "weights of 8 bits alone",
        lambda: _mixed(jnp.int8),
        ValueError,
        "no kernel multiplies float32 by int8; cast both to bfloat16, .* row_scale or col_scale",
    ),
    (
        "arrays that no registers are left for",
        lambda: _scaled(
            HopperConfig(tile=(256, 208), stages=3, late_store=False, store_columns=16)
        ),
        ValueError,
        r"208 accumulators of tile=\(256, 208\) leave are too few for residual and alpha and beta"
        r" and col_scale and gelu_tanh; the nearest tile that fits is \(256, \d+\)",
    ),
    ("config", lambda: gemm(A, B, config={"tile": 1}), TypeError, "config must be the config of a"),
    ("config's class", lambda: gemm(A, B, config=GemmConfig()), TypeError, "such as HopperConfig"),
    (
        "config's values",
        lambda: gemm(A, B, config=HopperConfig(late_store=False)),
        ValueError,
        r"config=HopperConfig.*store_columns must be at most 32 for float32, got 64",
    ),
    (
        "config for XLA",
        lambda: gemm(A, B, config=HopperConfig(), implementation="xla"),
        ValueError,
        "config and schedule have no meaning for implementation='xla'",
    ),
    ("schedule's name", lambda: gemm(A, B, schedule="hilbrt"), ValueError, "mean 'hilbert'"),
    ("schedule's kind", lambda: gemm(A, B, schedule=8), TypeError, "schedule must be a name"),
    (
        "schedule's grid",
        lambda: gemm(A, B, schedule=build("hilbert", 3, 3)),
        ValueError,
        r"schedule is made for the grid \(3, 3\); legal are \(1, 1\) for tiles of",
    ),
    (
        "gate",
        lambda: gated_gemm(A, B, jnp.ones((6, 9))),
        ValueError,
        r"w_gate and w_up must have the same shape, got \[6, 8\] and \[6, 9\]",
    ),
    (
        "gate's type",
        lambda: gated_gemm(A, B, B.astype(jnp.bfloat16)),
        TypeError,
        "w_gate and w_up must have the same dtype, got float32 and bfloat16",
    ),
    (
        "dimension numbers",
        lambda: dot_general(A, B, ((1,), (0,))),
        TypeError,
        r"dimension_numbers must be \(\(lhs_contracting",
    ),
    (
        "no dimension numbers",
        lambda: dot_general(A, A, None),
        ValueError,
        r"needs vectors or matrices, .* got lhs\[4, 6\] and rhs\[4, 6\]",
    ),
    (
        "another order of bytes",
        lambda: gemm(np.ones((4, 6), ">f4"), B),
        TypeError,
        "a must be an array of numbers of a type that JAX has, got dtype >f4",
    ),
    (
        "a masked array",
        lambda: matmul(np.ma.masked_array(np.ones((4, 6), np.float32)), B),
        ValueError,
        "masked arrays are not supported",
    ),
    (
        "a dimension that is not there",
        lambda: dot_general(A, B, (((2,), (0,)), ((), ()))),
        TypeError,
        r"contracting dimension 2 is not one of the 2 dimensions of lhs\[4, 6\]",
    ),
    (
        "dimensions that do not match",
        lambda: dot_general(A, B, (((0,), (0,)), ((), ()))),
        TypeError,
        r"equal sizes, got 4 in lhs\[4, 6\] \(dimension 0\) and 6 in rhs\[6, 8\]",
    ),
    (
        "dimensions without a partner",
        lambda: dot_general(A, B, (((0, 1), (0,)), ((), ()))),
        TypeError,
        r"as many contracting dimensions of lhs as of rhs, got \(0, 1\) and \(0,\)",
    ),
    (
        "a dimension twice",
        lambda: dot_general(A, A, (((0,), (0,)), ((0,), (0,)))),
        TypeError,
        r"names a dimension of lhs twice: contracting \(0,\), batch \(0,\)",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_an_error_says_what_is_wrong(
    call: Callable[[], Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def traced(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the product was traced")

    monkeypatch.setattr(product_p, "bind", traced)
    with pytest.raises(error) as raised:
        call()
    assert re.search(message, str(raised.value), re.DOTALL), raised.value


def test_an_activation_that_captures_a_traced_value_is_refused() -> None:
    def scaled(slope: jax.Array) -> jax.Array:
        return gemm(A, B, activation=lambda x: slope * x)

    with pytest.raises(TypeError, match="captures arrays of shapes"):
        jax.jit(scaled)(jnp.float32(2))


# Of sizes that no other test has, or the program that was warned of would be found again.
C, D = jnp.ones((11, 13)), jnp.ones((13, 17))
COMPLEX = jnp.ones((11, 13), jnp.complex64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gemm(C, D, schedule="hilbert"), "schedule='hilbert' has no effect.*no GPU is pla"),
        (
            lambda: gemm(COMPLEX, COMPLEX.T, schedule="hilbert"),
            "no effect.*takes .* complex64",
        ),
        (
            lambda: jax.jit(lambda c, d: gemm(c, d, config=HopperConfig(stages=3))).lower(
                C.astype(jnp.bfloat16), D.astype(jnp.bfloat16)
            ),
            r"^config=HopperConfig\(\.\.\.\) has no effect.*no GPU is pla",
        ),
        (lambda: gemm(C, D, beta=0.5), "beta=0.5 has no effect without a residual"),
    ],
)
def test_what_is_ignored_is_said(call: Callable[[], Any], message: str) -> None:
    with pytest.warns(IgnoredWarning, match=message) as warned:
        call()
    assert [pathlib.Path(warning.filename) for warning in warned] == [pathlib.Path(__file__)]


E, F = jax.ShapeDtypeStruct((11, 13), jnp.bfloat16), jax.ShapeDtypeStruct((13, 17), jnp.float32)
# A kernel widens what is narrow on the right, and nothing on the left.
NARROW = jax.ShapeDtypeStruct((11, 13), jnp.float8_e4m3fn)
MATRICES = jax.ShapeDtypeStruct((1, 13, 17), jnp.bfloat16)
SIZES = jax.ShapeDtypeStruct((1,), jnp.int32)
FIRST_WITH_FIRST = (((1,), (0,)), ((), ()))
CAST = (
    "promotes the operands, .* no kernel multiplies bfloat16 by (float32|float8_e4m3fn); cast .*"
    " to bfloat16"
)


@pytest.mark.parametrize(
    ("call", "operands"),
    [
        (matmul, (E, F)),
        (lambda a, b: gemm(a, b, bias=b[0]), (E, F)),
        (lambda a, b: dot_general(a, b, FIRST_WITH_FIRST), (E, F)),
        (lambda a, b: einsum("mk,kn->mn", a, b), (E, F)),
        (lambda a, b: projections(a, [b])[0], (E, F)),
        (ragged_dot, (NARROW, MATRICES, SIZES)),
        (grouped_gemm, (NARROW, MATRICES, SIZES)),
    ],
)
def test_a_line_whose_operands_are_promoted_is_warned_of_once(
    call: Callable[..., Any], operands: tuple[Any, ...]
) -> None:
    def step(*operands: Any) -> Any:
        return sum(call(*operands).sum() for _ in range(3))

    with jax.numpy_dtype_promotion("standard"):
        with warnings.catch_warnings(record=True) as found, target("h200"):
            warnings.simplefilter("default")
            jax.eval_shape(jax.grad(step), *operands)
        assert [(each.category, each.filename) for each in found] == [(PromotedWarning, __file__)]
        assert re.search(CAST, str(found[0].message))
        # Without a GPU no kernel is lost, XLA may be wanted, and `explain` says it itself.
        jax.eval_shape(call, *operands)
        with target("h200"):
            explain(call, *operands)
            jax.eval_shape(lambda a, b: gemm(a, b, implementation="xla"), E, F)


@pytest.mark.parametrize("types", [("float32", "float64"), ("complex64", "float32")])
def test_what_no_kernel_takes_whatever_it_is_cast_to_is_not_warned_of(
    types: tuple[str, str],
) -> None:
    operands = [jax.ShapeDtypeStruct((16, 16), jnp.dtype(each)) for each in types]
    with target("h200"), jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(matmul, *operands)
