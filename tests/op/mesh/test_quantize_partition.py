"""Arrays that are quantized on a mesh: each device its part, and nothing is sent."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_gemm import Recipe, quantize
from pallas_gemm.planning import quantize as planning
from tests import meshes
from tests.layers import normal


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return meshes.make_mesh()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of what devices quantize."""
    found: list[Any] = []
    decide = planning.decide

    def noted(how: Any, signature: Any, *rest: Any) -> Any:
        found.append(signature[0][0])
        return decide(how, signature, *rest)

    monkeypatch.setattr(planning, "decide", noted)
    return found


# Two by four devices, along x and y.
@pytest.mark.parametrize(
    ("spec", "options", "part"),
    [
        (("x", "y"), {"axis": "both"}, (256, 128)),
        (("y", None), {"axis": "both"}, (128, 512)),
        ((None, ("x", "y")), {"axis": -2}, (512, 64)),
        (("x", "y"), {"axis": "both", "block": (128, 128)}, (256, 128)),
        # One block is all of a dimension.
        ((None, "y"), {"axis": "both", "block": (1, 512)}, (512, 512)),
        # A device would have half a block.
        ((("x", "y"), None), {"axis": -2}, (128, 512)),
        ((None, ("x", "y")), {"axis": -1}, (512, 128)),
    ],
)
def test_each_device_quantizes_whole_blocks(
    mesh: Mesh, parts: list[Any], spec: Any, options: Any, part: Any
) -> None:
    x = normal(512, 512, dtype=jnp.bfloat16)
    f = functools.partial(quantize, **options)
    expected = jax.tree.leaves(f(x))
    placed = meshes.place(mesh, x, *spec)
    parts.clear()
    found, sent = meshes.run(f, placed)
    assert set(parts) == {part}
    if np.prod(np.divide((512, 512), part)) == 8:
        assert not sent
    for one, other in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_each_device_has_all_rows_of_groups_that_are_told_apart(
    kind: AxisType, parts: list[Any]
) -> None:
    x, sizes = normal(512, 512, dtype=jnp.bfloat16), jnp.array([100, 300])
    f = functools.partial(quantize, axis="both", block=((1, 128), (128, 128)))
    expected = jax.tree.leaves(f(x, group_sizes=sizes))
    placed = meshes.place(meshes.make_mesh(kind), x, "x", "y")
    parts.clear()
    found = jax.jit(lambda x: f(x, group_sizes=sizes))(placed)
    assert set(parts) == {(512, 128)}
    if kind == AxisType.Explicit:
        specs = [tuple(jax.typeof(own).sharding.spec) for own in jax.tree.leaves(found)]
        assert specs == [("x", "y"), ("x", "y"), ("y", None), (None, "y")]
    for one, other in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_values_stay_where_they_are(mesh: Mesh) -> None:
    x = meshes.place(mesh, normal(2, 256, 512, dtype=jnp.bfloat16), None, "x", "y")
    rows, columns = jax.jit(functools.partial(quantize, axis="both"))(x)
    split = NamedSharding(mesh, PartitionSpec(None, "x", "y"))
    turned = NamedSharding(mesh, PartitionSpec(None, "y", "x"))
    assert rows.values.sharding.is_equivalent_to(split, 3)
    assert columns.values.sharding.is_equivalent_to(turned, 3)
    for scale in (rows.scale, columns.scale):
        assert scale.sharding.is_equivalent_to(split, 3)


def test_a_layer_trains_on_a_mesh_as_on_one_device(mesh: Mesh) -> None:
    x, w, g = normal(512, 256), normal(256, 512, seed=1), normal(512, 512, seed=2)
    dot = functools.partial(Recipe().dot_general, dimension_numbers=(((1,), (0,)), ((), ())))

    def step(x: Any, w: Any, g: Any) -> Any:
        y, pull = jax.vjp(dot, x, w)
        return y, pull(g)

    expected = jax.tree.leaves(jax.jit(step)(x, w, g))
    placed = (
        meshes.place(mesh, x, "x", None),
        meshes.place(mesh, w, None, "y"),
        meshes.place(mesh, g, "x", "y"),
    )
    for one, other in zip(jax.tree.leaves(jax.jit(step)(*placed)), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_types_of_an_explicit_mesh_say_how_results_are_split() -> None:
    explicit = meshes.make_mesh(AxisType.Explicit)
    x = meshes.place(explicit, normal(256, 512, dtype=jnp.bfloat16), "x", "y")
    with jax.set_mesh(explicit):
        rows, columns = jax.jit(functools.partial(quantize, axis="both"))(x)
    assert jax.typeof(rows.values).sharding.spec == PartitionSpec("x", "y")
    assert jax.typeof(columns.values).sharding.spec == PartitionSpec("y", "x")
    # What an array on no mesh becomes is not taken from there.
    alone = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    for own in jax.tree.leaves(jax.eval_shape(functools.partial(quantize, axis="both"), alone)):
        assert own.sharding is None or own.sharding.mesh.empty


@pytest.mark.parametrize(
    ("spec", "scales"),
    [
        ((("x", "y"), None), [(("x", "y"), None), ("x", None)]),
        (("y", "x"), [("y", "x"), ("y", "x")]),
        ((None, ("y", "x")), [(None, "y"), (None, ("y", "x"))]),
    ],
)
def test_scales_are_split_as_far_as_devices_have_whole_blocks(spec: Any, scales: Any) -> None:
    explicit = meshes.make_mesh(AxisType.Explicit)
    x = normal(512, 512, dtype=jnp.bfloat16)
    both = jax.jit(functools.partial(quantize, axis="both"))
    found = both(meshes.place(explicit, x, *spec))
    for own, split, expected, whole in zip(found, (spec, spec[::-1]), both(x), scales, strict=True):
        assert jax.typeof(own.values).sharding.spec == PartitionSpec(*split)
        assert jax.typeof(own.scale).sharding.spec == PartitionSpec(*whole)
        for one, other in zip(own, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_what_several_devices_quantize_is_not_simulated(kind: AxisType) -> None:
    x = meshes.place(meshes.make_mesh(kind), normal(512, 512, dtype=jnp.bfloat16), "x", None)
    with pytest.raises(ValueError, match="simulates the kernel of one GPU"):
        jax.jit(functools.partial(quantize, implementation="interpret"))(x)


def test_a_device_quantizes_alone_inside_shard_map(mesh: Mesh, parts: list[Any]) -> None:
    x = normal(512, 512, dtype=jnp.bfloat16)
    spec = PartitionSpec("x", "y")
    f = jax.shard_map(lambda x: quantize(x)[0], mesh=mesh, in_specs=spec, out_specs=spec)
    parts.clear()
    found = jax.jit(f)(x)
    assert set(parts) == {(256, 128)}
    np.testing.assert_array_equal(np.asarray(found), np.asarray(quantize(x).values))
