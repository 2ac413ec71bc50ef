"""Arrays are split anew without being gathered, and products whose operands disagree profit."""

import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench import mesh_traffic, model_einsums
from bench.model_einsums import Case
from pallas_gemm import einsum, explain_on_mesh
from pallas_gemm.op.mesh import resharding
from pallas_gemm.op.mesh.resharding import Placement

AXES = {"x": 2, "y": 2, "z": 2}
SIZES = tuple(AXES.items())


def _placements(dims: int) -> list[Placement]:
    """Returns every way to split an array."""
    places = itertools.product(range(-1, dims), repeat=len(AXES))
    orders = itertools.permutations(AXES)
    return list(
        dict.fromkeys(
            tuple(
                tuple(x for x, dim in zip(order, own, strict=True) if dim == i) for i in range(dims)
            )
            for own, order in itertools.product(places, orders)
        )
    )


def _pairs(count: int) -> list[tuple[Placement, Placement]]:
    choices = random.Random(0)
    every = _placements(3)
    return [(choices.choice(every), choices.choice(every)) for _ in range(count)]


def test_no_array_is_sent_more_than_once_over() -> None:
    for before, after in _pairs(500):
        steps = resharding.steps(before, after, SIZES)
        received = resharding.received(before, steps, AXES)
        # As XLA's last resort has it.
        assert received <= 1 - 1 / resharding.count(before, AXES), (before, after)
    moved = functools.partial(resharding.received, sizes=AXES)
    swapped = (("x",), ("y",)), (("y",), ("x",))
    assert moved(swapped[0], resharding.steps(*swapped, SIZES)) == 1 / 4
    to_columns = (("x", "y"), ()), ((), ("x", "y"))
    assert moved(to_columns[0], resharding.steps(*to_columns, SIZES)) == 3 / 16


def test_every_step_keeps_the_array() -> None:
    mesh = model_einsums.mesh(AXES)
    array = np.arange(512.0).reshape(8, 8, 8)
    pairs = _pairs(5)
    names = {step.name for pair in pairs for step in resharding.steps(*pair, SIZES)}
    assert names == {"slice", "gather", "exchange", "permute"}

    def anew(x: jax.Array) -> list[jax.Array]:
        results = []
        for before, after in pairs:
            steps = resharding.steps(before, after, SIZES)

            def run(part: jax.Array, steps: tuple[resharding.Step, ...] = steps) -> jax.Array:
                return functools.reduce(lambda part, step: step.run(part), steps, part)

            specs = (P(*(axes or None for axes in own)) for own in (before, after))
            mapped = jax.shard_map(
                run, mesh=mesh, in_specs=next(specs), out_specs=next(specs), check_vma=False
            )
            results.append(mapped(x))
        return results

    for result in jax.jit(anew)(jnp.asarray(array, jnp.float32)):
        np.testing.assert_array_equal(result, array)


CONTRADICTIONS = [
    # What each operand has along an axis, and what the result is to have, are three dimensions.
    ("btd,dnh->btnh", {"x": 4, "y": 2}, (P("x", None, "y"), P(("x", "y"))), P("y", None, "x")),
    (
        "bsm,emh->bseh",
        {"x": 2, "y": 4},
        (P(None, None, ("x", "y")), P(None, "y")),
        P("y", None, "x"),
    ),
    ("bmk,bkn->bmn", {"x": 2, "y": 4}, (P("y", None, "x"), P()), P(("x", "y"))),
    ("btnh,nhd->btd", {"x": 2, "y": 4}, (P(None, "y"), P(None, "x")), P("y")),
    # Nothing is split along y, so XLA lets it split what is contracted, and so may we.
    ("bd,de->be", {"x": 2, "y": 4}, (P("x"), P("x")), P("x")),
    ("ed,bd->be", {"x": 2, "y": 4}, (P(None, "x"), P("x")), P("x")),
]


@pytest.mark.parametrize("case", CONTRADICTIONS, ids=lambda case: case[0])
def test_operands_that_disagree_cost_no_more_than_xlas(case: Any) -> None:
    subscripts, axes, specs, out = case
    mesh = model_einsums.mesh(axes)
    own = Case(subscripts, mesh, specs, dict.fromkeys("bdehkmnst", 16))
    operands = [
        jax.device_put(np.arange(np.prod(x.shape)).reshape(x.shape) % 5.0, x.sharding)
        for x in own.shapes()
    ]
    results, costs = [], []
    for multiply in (einsum, jnp.einsum):
        run = jax.jit(
            functools.partial(multiply, subscripts), out_shardings=NamedSharding(mesh, out)
        )
        program = run.lower(*operands).compile()
        costs.append(mesh_traffic.cost(program))
        results.append(program(*operands))
    assert mesh_traffic.Row(own, False, *costs).worse == ()
    np.testing.assert_array_equal(*results)


def test_axes_of_a_dimension_keep_the_order_that_its_operands_have() -> None:
    """The gradient of weights that are split along one of the axes of the examples."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)
    explained = explain_on_mesh(
        jax.jit(
            lambda x, g: einsum("bd,be->de", x, g), out_shardings=NamedSharding(mesh, P("fsdp"))
        ),
        x,
        x,
    )
    # Three quarters of the sums are scattered, and what is left is exchanged between two.
    received = (3 * 32 * 32 // 4 + 32 * 32 // 4) * 4
    assert f"{received / 1e6:.3g} MB arrive at each device" in str(explained.products[0].mesh)


def test_what_is_split_into_the_fewest_parts_is_gathered_first() -> None:
    sizes = {"x": 4, "y": 2}
    whole = ((), ())
    for now, dim in (((("x",), ("y",)), 1), ((("y",), ("x",)), 0)):
        step = resharding._gather(now, whole, sizes)
        assert (step.name, step.axes, step.source) == ("gather", ("y",), dim)
