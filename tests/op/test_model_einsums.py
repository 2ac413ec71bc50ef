"""The einsums of real models on meshes: no more is sent and computed than by XLA's own products."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import einsum
from pallas_gemm.op import traffic
from tests import meshes, model_einsums, reference
from tests.model_einsums import Case

Einsum = Callable[..., jax.Array]


def _step(multiply: Einsum, cases: list[Case], operands: Any) -> Any:
    """Forward, and backward from what follows from the result, as in training."""

    def one(case: Case, given: Any) -> Any:
        result, pull = jax.vjp(functools.partial(multiply, case.subscripts), *given)
        return result, pull(result)

    return [one(case, given) for case, given in zip(cases, operands, strict=True)]


@dataclasses.dataclass
class _Compiled:
    """What a program of all einsums sends, computes, and results in."""

    sent: float
    flops: float
    run: Callable[..., Any]


def _compiled(multiply: Einsum, cases: list[Case], operands: Any) -> _Compiled:
    # Gradients are split as what they are the gradients of.
    split = [(None, tuple(x.sharding for x in given)) for given in operands]
    step = jax.jit(functools.partial(_step, multiply, cases), out_shardings=split)
    compiled = step.lower(operands).compile()
    costs: Any = compiled.cost_analysis()
    return _Compiled(traffic.received(compiled.as_text()), costs["flops"], compiled)


EVERY = 4
"""Each mesh takes one einsum of so many, and the next mesh the next: all of them take minutes."""


@pytest.mark.parametrize("axes", model_einsums.MESHES)
def test_einsums_of_models_send_no_more_than_xlas(axes: str) -> None:
    first = list(model_einsums.MESHES).index(axes) % EVERY
    cases = model_einsums.cases(model_einsums.mesh(axes))[first::EVERY]
    rng = np.random.default_rng(0)
    operands = [
        tuple(
            jax.device_put(reference.integers(rng, x.shape, jnp.float32), x.sharding)
            for x in case.shapes()
        )
        for case in cases
    ]
    ours, stock = (_compiled(f, cases, operands) for f in (einsum, jnp.einsum))
    assert ours.sent <= stock.sent
    # Where an axis splits none of the operands, XLA may send more to compute less.
    assert ours.flops <= 1.05 * stock.flops or ours.sent < stock.sent
    found, expected = ours.run(operands), stock.run(operands)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(own, other)


ROWS: list[tuple[str, tuple[str, str], P, P]] = [
    ("btd,sndh->sbtnh", ("data", "tensor"), P("data"), P(None, "tensor")),
    ("btd,ckdh->cbtkh", ("data", "tensor"), P("data"), P(None, "tensor")),
    ("btd,dgh->btgh", ("data", "tensor"), P("data"), P(None, None, "tensor")),
    ("bqnh,bknh->bnqk", ("data", "tensor"), P("data", None, "tensor"), P("data", None, "tensor")),
    ("bnqk,bknh->bqnh", ("data", "tensor"), P("data", "tensor"), P("data", None, "tensor")),
    ("bsm,emh->bseh", ("expert", "tensor"), P(), P("expert", None, "tensor")),
    ("abtd,df->abtf", ("data", "expert"), P("data", "expert"), P()),
    ("btd,nhd->btnh", ("data", "tensor"), P("data"), P("tensor")),
    ("btd,dkgh->btkgh", ("data", "tensor"), P("data"), P(None, "tensor")),
    ("ebcm,emh->ebch", ("expert", "tensor"), P("expert"), P("expert", None, "tensor")),
]
"""Those of the table in `docs/parallel.md`."""


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_dimensions_are_split_wherever_they_stand(kind: AxisType) -> None:
    def operands(row: tuple[str, tuple[str, str], P, P]) -> list[jax.ShapeDtypeStruct]:
        subscripts, axes, *specs = row
        mesh = jax.make_mesh((2, 4), axes, axis_types=(kind,) * 2)
        letters = subscripts.partition("->")[0].split(",")
        return [
            jax.ShapeDtypeStruct((8,) * len(own), jnp.float32, sharding=NamedSharding(mesh, spec))
            for own, spec in zip(letters, specs, strict=True)
        ]

    for row in ROWS:
        compiled = jax.jit(functools.partial(einsum, row[0])).lower(*operands(row)).compile()
        assert meshes.sent_in(compiled.as_text()) == {}, row


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

    for case in (
        # An axis on two dimensions, and one of four devices for six columns.
        ("bd,df->bf", [P("x"), P(None, "x")], None),
        ("bd,df->bf", [P("x"), P()], P("x", "x")),
        ("bd,dn->bn", [P("x"), P()], P(None, "y")),
    ):
        ours, stock = (refused(f, *case) for f in (einsum, jnp.einsum))
        assert ours == stock
