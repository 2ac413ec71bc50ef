"""Records of weights of few bits: what they stand for, how they are made, and what others store."""

import dataclasses
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from pallas_gemm import QuantizedWeight, quantize_weights
from tests import layers

RNG = np.random.default_rng
SCALES = RNG(7).choice([0.5, 0.25, 2.0], (4, 24)).astype(np.float16)


def _spread(x: Any, k: int) -> np.ndarray:
    """What each row of a weight has of its group."""
    return np.asarray(x, np.float64)[np.arange(k) // (k // len(x))]


def _bits(numbers: Any, shifts: list[int]) -> np.ndarray:
    """The four bits of each number from each place on, one after the other along the last axis."""
    wide = np.asarray(numbers).view(np.uint32).astype(np.int64)
    return np.stack([(wide // 2**shift) % 16 for shift in shifts], axis=-1)


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize(
    ("how", "most"),
    [
        ({"bits": np.int64(8)}, 127),
        ({"bits": 4}, 7),
        ({"bits": 4, "zero_points": True}, 15),
        ({"dtype": "e4m3"}, 448),
        ({"dtype": "e5m2"}, 57344),
        ({"dtype": jnp.float4_e2m1fn}, 6),
    ],
    ids=str,
)
def test_a_record_stands_for_the_weight(
    how: dict[str, Any], most: float, group: Any, axis: int
) -> None:
    w = RNG(0).normal(size=(3, 32, 24)).astype(np.float32)
    given = w if axis == -2 else w.swapaxes(1, 2)
    made = QuantizedWeight.of(given, group=group, axis=axis, scale_dtype="f32", **how)
    assert made.scale.shape == (3, 32 // (group or 32), 24)
    assert (made.group, made.shape, made.dtype) == (group or 32, given.shape, jnp.float32)
    stands = np.asarray(made.widened(), np.float64)
    stands = stands if axis == -2 else stands.swapaxes(1, 2)
    groups = w.reshape(3, -1, group or 32, 24).astype(np.float64)
    span = np.abs(groups).max(2)
    if "zero_points" in how:
        span = np.maximum(groups.max(2), 0) - np.minimum(groups.min(2), 0)
    np.testing.assert_allclose(made.scale, span / most, rtol=1e-6)
    error = np.abs(stands.reshape(groups.shape) - groups)
    if "dtype" not in how:
        # Half a step: the zero point is rounded so that the ends lose no more.
        bound = made.scale * 0.501
    else:
        digits = {"e4m3": 4, "e5m2": 3}.get(how["dtype"], 2)
        bound = span * 2.0**-digits
        assert (np.linalg.norm(error) / np.linalg.norm(w)) < 2.0**-digits / 1.5
    assert (error.max(2) <= bound).all()
    # Each group has its own: another one's scale would be wrong.
    assert np.unique(made.scale).size > 8


def test_memory_is_what_few_bits_take() -> None:
    w = jnp.ones((64, 32), jnp.bfloat16)
    assert QuantizedWeight.of(w).nbytes == 64 * 32 + 32 * 4
    assert QuantizedWeight.of(w, bits=4, group=16).nbytes == 64 * 32 // 2 + 4 * 32 * 2
    zeros = QuantizedWeight.of(w, bits=4, group=16, zero_points=True)
    assert zeros.nbytes == 64 * 32 // 2 + 4 * 32 * 2 + 4 * 32 // 2


def test_groups_of_zeros_stay_zeros_and_a_nan_stays_in_its_group() -> None:
    w = np.ones((16, 4), np.float32)
    w[:8, 0], w[8, 1] = 0, np.nan
    for zero_points in (False, True):
        made = QuantizedWeight.of(w, bits=4, group=8, zero_points=zero_points)
        stands = np.asarray(made.widened())
        np.testing.assert_array_equal(stands[:8, 0], 0)
        assert np.isnan(stands[8:, 1]).all()
        assert np.isfinite(np.delete(stands, 1, axis=1)).all()


def test_zero_is_exact_with_zero_points() -> None:
    w = RNG(1).uniform(1, 2, (16, 4)).astype(np.float32)
    w[3] = 0
    made = QuantizedWeight.of(w, bits=4, zero_points=True)
    np.testing.assert_array_equal(np.asarray(made.widened())[3], 0)


def test_jax_takes_a_record_as_the_array() -> None:
    made: Any = QuantizedWeight.of(RNG(0).normal(size=(16, 8)).astype(np.float32))
    x = jnp.ones((4, 16))
    np.testing.assert_array_equal(x @ made, x @ made.widened())
    np.testing.assert_array_equal(jnp.dot(x, made), x @ made.widened())
    through = jax.jit(lambda w: dataclasses.replace(w, scale=2 * w.scale))(made)
    np.testing.assert_array_equal(through.widened(), 2 * made.widened())
    assert made[...] is made
    experts = QuantizedWeight.of(RNG(0).normal(size=(3, 16, 8)).astype(np.float32), group=4)
    np.testing.assert_array_equal(experts[1].widened(), experts.widened()[1])
    with pytest.raises(IndexError, match=r"shape \[16, 8\] may be indexed by .* got 0"):
        made[0]


class Block(nn.Module):
    """Stock layers of several kinds."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Embed(10, 16, name="embed")(x)
        x = nn.LayerNorm(name="norm")(x)
        x = nn.Dense(24, name="up")(x)
        return nn.Dense(3, name="router")(x)


def test_kernels_of_a_linen_model_become_records_and_all_else_stays() -> None:
    tokens = jnp.arange(8).reshape(2, 4)
    variables = Block().init(jax.random.key(0), tokens)
    made = quantize_weights(variables, bits=8)
    records = [x for x in jax.tree.leaves(made, is_leaf=_is_record) if _is_record(x)]
    assert [x.shape for x in records] == [(16, 24)]
    assert isinstance(made["params"]["up"]["kernel"], QuantizedWeight)
    rest = jax.tree.map(lambda x: x.widened() if _is_record(x) else x, made, is_leaf=_is_record)
    layers.assert_same_structure(rest, variables)
    # A stock model computes with what the records stand for.
    np.testing.assert_array_equal(Block().apply(made, tokens), Block().apply(rest, tokens))
    assert not jnp.array_equal(Block().apply(made, tokens), Block().apply(variables, tokens))
    shapes = jax.eval_shape(Block().init, jax.random.key(0), tokens)
    planned = quantize_weights(shapes, bits=8)
    assert jax.tree.structure(planned) == jax.tree.structure(made)
    assert jax.tree.map(jnp.shape, jax.tree.leaves(made)) == [
        x.shape for x in jax.tree.leaves(planned)
    ]


def _is_record(x: Any) -> bool:
    return isinstance(x, QuantizedWeight)


def test_boxed_kernels_stay_in_their_boxes() -> None:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
    variables = nn.Dense(8, kernel_init=init).init(jax.random.key(0), jnp.ones((2, 16)))
    made = quantize_weights(variables, bits=4, group=8)
    box = made["params"]["kernel"]
    assert box.names == ("data", "model")
    assert isinstance(box.value, QuantizedWeight)


def test_kernels_of_an_nnx_state_become_records() -> None:
    layer = nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    quantized = nnx.merge(graph, quantize_weights(state, bits=4, group=8))
    x = jnp.asarray(RNG(0).normal(size=(4, 16)).astype(jnp.float32))
    record = quantized.kernel.get_value()
    assert isinstance(record, QuantizedWeight)
    np.testing.assert_array_equal(quantized(x), x @ record.widened())


def test_weights_of_equinox_are_stored_with_k_last() -> None:
    model: Any = eqx.nn.Sequential(
        [
            eqx.nn.Linear(16, 8, key=jax.random.key(0)),
            eqx.nn.LayerNorm(8),
            eqx.nn.Linear(8, 4, key=jax.random.key(1)),
        ]
    )
    embedding = eqx.nn.Embedding(16, 8, key=jax.random.key(2))
    made, same = quantize_weights((model, embedding), bits=4, group=8)
    weight = made[0].weight
    assert (weight.axis, weight.shape, weight.scale.shape) == (-1, (8, 16), (2, 8))
    assert made[2].weight.scale.shape == (1, 4)
    x = jnp.asarray(RNG(0).normal(size=16).astype(jnp.float32))
    np.testing.assert_allclose(made[0](x), weight.widened() @ x + model[0].bias, rtol=1e-6)
    assert isinstance(made[1].weight, jax.Array)
    assert isinstance(same.weight, jax.Array)


def test_the_caller_says_which_leaves_become_records() -> None:
    params = {"experts": {"up": jnp.ones((3, 16, 8))}, "up": {"kernel": jnp.ones((16, 8))}}
    seen = []

    def where(path: str, leaf: Any) -> bool:
        seen.append((path, leaf.shape))
        return path.startswith("experts")

    made = quantize_weights(params, bits=4, group=8, where=where)
    assert made["experts"]["up"].scale.shape == (3, 2, 8)
    assert isinstance(made["up"]["kernel"], jax.Array)
    assert seen == [("experts/up", (3, 16, 8)), ("up/kernel", (16, 8))]


class QArray(types.SimpleNamespace):
    """The fields of qwix's."""


def _qwix(*, zero: bool, dtype: Any = jnp.int8, scale: Any = (1, 24)) -> QArray:
    rng = RNG(3)
    return QArray(
        qvalue=jnp.asarray(rng.integers(-7, 8, (32, 24)).astype(dtype)),
        scale=jnp.asarray(rng.choice([0.5, 0.25, 2], scale).astype(jnp.bfloat16)),
        zero_point=jnp.asarray(rng.integers(-3, 4, scale).astype(dtype)) if zero else None,
    )


def _of_qwix(array: QArray) -> np.ndarray:
    """What a `QArray` stands for, each dimension of a scale repeated as its size says."""

    def whole(x: Any) -> np.ndarray:
        x = np.asarray(x, np.float64)
        for axis, size in enumerate(array.qvalue.shape):
            x = x.repeat(size // x.shape[axis], axis)
        return x

    zero = 0 if array.zero_point is None else whole(array.zero_point)
    return (np.asarray(array.qvalue, np.float64) - zero) * whole(array.scale)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("scale", "axis", "own"),
    [
        ((1, 24), -2, (1, 24)),
        ((4, 24), -2, (4, 24)),
        ((1, 1), -2, (1, 24)),
        ((4, 1), -2, (4, 24)),
        ((32, 4), -1, (4, 32)),
        ((32, 1), -1, (1, 32)),
    ],
)
def test_an_array_of_qwix_is_read(
    scale: tuple[int, int], axis: int, own: tuple[int, int], zero: bool
) -> None:
    array = _qwix(zero=zero, scale=scale, dtype=jnp.int4)
    made = QuantizedWeight.from_qwix(array)
    assert (made.axis, made.scale.shape) == (axis, own)
    np.testing.assert_array_equal(np.asarray(made.widened(), np.float64), _of_qwix(array))
    held = types.SimpleNamespace(array=array, how="as a parameter")
    (read,) = jax.tree.leaves(quantize_weights({"kernel": held}), is_leaf=_is_record)
    np.testing.assert_array_equal(read.widened(), made.widened())


def test_other_arrays_of_qwix_are_refused() -> None:
    with pytest.raises(TypeError, match=r"array must be a qwix.QArray, got int: 3"):
        QuantizedWeight.from_qwix(3)
    with pytest.raises(ValueError, match=r"scale must have one value .* qvalue\[32, 24\], got"):
        QuantizedWeight.from_qwix(_qwix(zero=False, scale=(4, 12)))
    array = _qwix(zero=False, scale=(4, 24))
    array.scale = array.scale[:0]
    with pytest.raises(ValueError, match=r"scale must have one value .* got \[0, 24\]"):
        QuantizedWeight.from_qwix(array)
    with pytest.raises(TypeError, match=r"qvalue must be one of float4_e2m1fn, .*, got int32"):
        QuantizedWeight.from_qwix(_qwix(zero=False, dtype=jnp.int32))
    array = _qwix(zero=True, scale=(4, 24))
    array.zero_point = array.zero_point[::2]
    with pytest.raises(ValueError, match="as many groups as each other, or one, got 2 and 4"):
        QuantizedWeight.from_qwix(array)


def _int32(shape: tuple[int, int], seed: int) -> np.ndarray:
    return RNG(seed).integers(-(2**31), 2**31, shape).astype(np.int32)


def test_a_layer_of_awq_is_read() -> None:
    qweight, qzeros = _int32((64, 3), 0), _int32((4, 3), 1)
    made = QuantizedWeight.from_awq(qweight, SCALES, qzeros)
    # Column c of eight lies at these bits: 0 lowest, then 4 in the second four, and so on.
    places = [0, 16, 4, 20, 8, 24, 12, 28]
    values = _bits(qweight, places).reshape(64, 24)
    zeros = _bits(qzeros, places).reshape(4, 24)
    assert (made.values.dtype, made.dtype) == (jnp.uint4, jnp.float16)
    expected = (values - _spread(zeros, 64)) * _spread(SCALES, 64)
    np.testing.assert_array_equal(np.asarray(made.widened(), np.float64), expected)


@pytest.mark.parametrize("version", [1, 2])
def test_a_layer_of_gptq_is_read(version: int) -> None:
    qweight, qzeros = _int32((8, 24), 0), _int32((4, 3), 1)
    made = QuantizedWeight.from_gptq(
        *(qweight, SCALES, qzeros), g_idx=np.repeat(np.arange(4), 16), version=version
    )
    values = _bits(qweight, [4 * i for i in range(8)]).transpose(0, 2, 1).reshape(64, 24)
    zeros = _bits(qzeros, [4 * i for i in range(8)]).reshape(4, 24)
    zeros = (zeros + (version == 1)) % 16
    expected = (values - _spread(zeros, 64)) * _spread(SCALES, 64)
    np.testing.assert_array_equal(np.asarray(made.widened(), np.float64), expected)


def test_symmetric_values_of_gptq_are_signed() -> None:
    qweight = _int32((8, 24), 0)
    made = QuantizedWeight.from_gptq(qweight, SCALES)
    assert (made.values.dtype, made.zero) == (jnp.int4, None)
    sevens = np.full((4, 3), 0x77777777, np.int32)
    same = QuantizedWeight.from_gptq(qweight, SCALES, sevens)
    np.testing.assert_array_equal(made.widened(), same.widened())


def test_what_is_no_such_layer_is_refused() -> None:
    good = _int32((64, 3), 0), SCALES, _int32((4, 3), 1)
    with pytest.raises(TypeError, match=r"qweight must be a matrix of int32, .* got float32\[3\]"):
        QuantizedWeight.from_awq(np.ones(3, np.float32), *good[1:])
    with pytest.raises(ValueError, match=r"qzeros must be of shape \[4, 3\], got \[3, 3\]"):
        QuantizedWeight.from_awq(*good[:2], good[2][:3])
    with pytest.raises(ValueError, match=r"for a weight of k=64 and n=24, got \[4, 23\]"):
        QuantizedWeight.from_awq(good[0], SCALES[:, 1:], good[2])
    with pytest.raises(TypeError, match=r"scales must be of bfloat16, .* got int32"):
        QuantizedWeight.from_awq(good[0], SCALES.astype(np.int32), good[2])
    rows = _int32((8, 24), 0)
    with pytest.raises(ValueError, match=r"sorts rows by their activations \(desc_act=True\)"):
        QuantizedWeight.from_gptq(rows, *good[1:], g_idx=np.arange(64) % 4)
    with pytest.raises(ValueError, match="version must be 1 or 2, got 3"):
        QuantizedWeight.from_gptq(rows, *good[1:], version=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 3}, "bits must be 8 or 4, got 3"),
        ({"bits": [8]}, r"bits must be 8 or 4, got \[8\]"),
        ({"group": 0}, "group must be at least 1, got 0"),
        ({"group": 2.0}, "group must be a number of elements or None, got 2.0"),
        ({"group": 12}, r"a multiple of group=12, got 16 in \[16, 8\] .*; group=4 would fit"),
        ({"zero_points": True}, "zero_points=True is for bits=4, .* got bits=8, dtype=None"),
        ({"scale_dtype": "e4m3"}, "scale_dtype must be bfloat16, .* got float8_e4m3fn"),
        ({"axis": 0}, "axis must be -2 or -1, got 0"),
    ],
)
def test_what_cannot_be_quantized_so_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedWeight.of(jnp.ones((16, 8)), **given)


def test_what_is_no_weight_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype must be one of float4_e2m1fn, .* got int32"):
        QuantizedWeight.of(jnp.ones((16, 8)), dtype=jnp.int32)
    with pytest.raises(TypeError, match="w must be of a floating-point type, got dtype int8"):
        QuantizedWeight.of(jnp.ones((16, 8), jnp.int8))
    with pytest.raises(ValueError, match=r"w must be a matrix or several, got shape \[8\]"):
        QuantizedWeight.of(jnp.ones(8))
    with pytest.raises(ValueError, match=r"size of at least 1, got 0 in \[0, 8\]"):
        QuantizedWeight.of(jnp.ones((0, 8)))
    params = {"up": {"kernel": jnp.ones((20, 8))}}
    with pytest.raises(ValueError, match=r"up/kernel must have .* group=8, got 20 in \[20, 8\]"):
        quantize_weights(params, bits=4, group=8)
    with pytest.raises(TypeError, match=r"where must be a function .*, got 'up'"):
        quantize_weights(params, where="up")  # type: ignore[arg-type]


def test_a_record_without_a_type_stands_for_an_array_of_the_scales_type() -> None:
    made = QuantizedWeight.of(jnp.ones((16, 8)), bits=4, group=8)
    np.testing.assert_array_equal(
        jnp.asarray(dataclasses.replace(made, dtype=None)), made.widened(jnp.bfloat16)
    )


def test_scales_are_split_as_the_values_are() -> None:
    w = jnp.ones((3, 16, 8))
    spec = jax.P("e", "k", "n")
    grouped = QuantizedWeight.of(w, bits=4, group=8, zero_points=True)
    assert jax.tree.leaves(grouped.specs(spec), is_leaf=_is_spec) == [spec] * 3
    whole = QuantizedWeight.of(w).specs(spec)
    assert (whole.values, whole.scale) == (spec, jax.P("e", None, "n"))
    turned = QuantizedWeight.of(w, bits=4, group=8, axis=-1).specs(jax.P("e", "n"))
    assert turned.scale == jax.P("e", None, "n")


def _is_spec(x: Any) -> bool:
    return isinstance(x, jax.P)
