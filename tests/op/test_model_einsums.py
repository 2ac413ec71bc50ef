"""The einsums of real models on meshes: no more is sent and computed than by XLA's own products."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench import mesh_traffic, model_einsums
from bench.model_einsums import Case
from pallas_gemm import einsum
from tests import meshes

Einsum = Callable[..., jax.Array]

EVERY = 16
"""Each mesh takes one einsum of so many, and the next mesh the next: all of them take minutes."""


@pytest.mark.parametrize("axes", model_einsums.MESHES)
def test_einsums_of_models_cost_no_more_than_xlas(axes: str) -> None:
    first = list(model_einsums.MESHES).index(axes) % EVERY
    mesh = model_einsums.mesh(model_einsums.MESHES[axes])
    rng = np.random.default_rng(0)
    for case in list(model_einsums.cases(mesh))[first::EVERY]:
        operands = [
            jax.device_put(np.float32(rng.integers(-2, 3, x.shape)), x.sharding)
            for x in case.shapes()
        ]
        ours, stock = (mesh_traffic.compiled(f, case, True) for f in (einsum, jnp.einsum))
        costs = map(mesh_traffic.cost, (ours, stock))
        assert mesh_traffic.Row(case, True, *costs).worse == (), case
        found, expected = ours(*operands), stock(*operands)
        for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("row", range(len(model_einsums.TABLE)))
def test_no_row_of_the_table_costs_more_than_xlas(row: int) -> None:
    case = list(model_einsums.table())[row]
    assert mesh_traffic.compare(case, gradients=True).worse == ()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_dimensions_are_split_wherever_they_stand(kind: AxisType) -> None:
    for subscripts, axes, specs, _ in model_einsums.TABLE:
        sizes = dict.fromkeys("abcdefghijklmnopqrst", 8)
        case = Case(subscripts, model_einsums.mesh(axes, kind), specs, sizes)
        compiled = mesh_traffic.compiled(einsum, case, False)
        assert meshes.sent_in(compiled.as_text()) == {}, subscripts


def test_what_no_mesh_can_split_is_refused_as_by_jax() -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)

    def refused(multiply: Einsum, subscripts: str, specs: list[P], out: P | None) -> str:
        letters = subscripts.partition("->")[0].split(",")
        operands = [
            jax.ShapeDtypeStruct(
                tuple(6 if x == "n" else 8 for x in own),
                jnp.float32,
                sharding=NamedSharding(mesh, spec),
            )
            for own, spec in zip(letters, specs, strict=True)
        ]
        with jax.set_mesh(mesh), pytest.raises(Exception, match=r"x|y|divis") as error:
            jax.eval_shape(functools.partial(multiply, subscripts, out_sharding=out), *operands)
        return f"{type(error.value).__name__}: {error.value}"

    for *case, named in (
        # An axis on two dimensions, and one of four devices for six columns.
        ("bd,df->bf", [P("x"), P(None, "x")], None, "; 'x' splits b and f"),
        ("bd,df->bf", [P("x", "y"), P("y", "x")], None, "; 'x' splits b and f"),
        ("bd,df->bf", [P("x"), P()], P("x", "x"), ""),
        ("bd,dn->bn", [P("x"), P()], P(None, "y"), ""),
    ):
        ours, stock = (refused(f, *case) for f in (einsum, jnp.einsum))
        assert ours == stock + named
