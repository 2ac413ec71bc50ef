"""Pieces of k that a call names: simulated, and refused before a kernel is traced."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, gated_gemm, gemm, gram, grouped_gemm
from pallas_gemm.kernels.blackwell.config import BlackwellConfig
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.op.product import product_p
from schedules import Pieces, build, split_k, swizzle
from tests import reference
from tests.reference import Formula

M, N, K = 136, 104, 328
"""3 x 2 tiles of 64 x 64 in six steps; the last row, column and step of them are short."""
TILES, STEPS = swizzle(3, 2, group=2), 6
SIMULATED = functools.partial(gemm, transpose_b=True, implementation="interpret")


def operands(draw: Any, *, lead: tuple[int, ...] = ()) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "a": draw(rng, (*lead, M, K), jnp.bfloat16),
        "b": draw(rng, (*lead, N, K), jnp.bfloat16),
        "bias": draw(rng, (N,), jnp.float32),
        "residual": draw(rng, (*lead, M, N), jnp.bfloat16),
    }


@pytest.mark.parametrize("last", [None, 4])
def test_products_in_pieces_are_exact(last: int | None) -> None:
    given, formula = (
        operands(reference.integers),
        Formula(transpose_b=True, activation="relu", beta=2),
    )
    pieces = split_k(TILES, STEPS, 4, last)
    named = functools.partial(SIMULATED, activation="relu", beta=2, schedule=pieces)
    reference.assert_exact(named(**given), formula(**given))
    plan = explain(named, **given).plan
    assert plan is not None
    config = plan.config
    assert (config.split_k, config.split_last, config.schedule) == (4, last, TILES)


def test_real_numbers_in_pieces_are_as_good_as_xlas_and_those_of_the_config() -> None:
    given, formula = operands(reference.normal), Formula(transpose_b=True, activation="gelu")
    pieces = split_k(TILES, STEPS, 4)
    ours = SIMULATED(**given, activation="gelu", schedule=pieces)
    xlas = gemm(**given, transpose_b=True, activation="gelu", implementation="xla")
    reference.assert_as_good_as_xla(ours, xlas, formula(**given))
    config = HopperConfig(
        tile=(64, 64), consumers=1, stages=2, store_columns=32, split_k=4, schedule=TILES
    )
    for how in ({}, {"schedule": pieces}):
        np.testing.assert_array_equal(
            SIMULATED(**given, activation="gelu", config=config, **how), ours
        )


def test_a_batch_in_pieces_is_stacked_along_the_rows() -> None:
    given = operands(reference.integers, lead=(2,))
    result = SIMULATED(**given, schedule=split_k(swizzle(6, 2), STEPS, 3))
    reference.assert_exact(result, Formula(transpose_b=True)(**given))


def test_gradients_of_products_in_pieces_are_exact() -> None:
    given = operands(reference.integers)
    product = functools.partial(SIMULATED, schedule=split_k(TILES, STEPS, 4))
    result, pull = jax.vjp(lambda each: product(**each), given)
    (gradients,) = pull(result)
    # Their products have other sizes, and the order that suits them.
    for name, exact in Formula(transpose_b=True).gradients(given, reference.wide(result)).items():
        reference.assert_exact(gradients[name], exact)


def test_equal_pieces_are_one_program() -> None:
    given = operands(reference.integers)
    traced = []

    @functools.partial(jax.jit, static_argnames="schedule")
    def product(a: Any, b: Any, schedule: Pieces) -> jax.Array:
        traced.append(schedule)
        return gemm(a, b, transpose_b=True, schedule=schedule)

    for parts in (2, 2, 3):
        jax.eval_shape(product, given["a"], given["b"], split_k(TILES, STEPS, parts))
    assert [len(pieces) for pieces in traced] == [12, 18]


ROWS_CUT = HopperConfig(tile=(64, 64), consumers=1, split_k=4)
PAIRED_CUT = BlackwellConfig(tile=(128, 64), cluster=(1, 1), split_k=4)
OTHER_ORDER = np.concatenate(
    [split_k(TILES, STEPS, 2).table[6:], split_k(TILES, STEPS, 2).table[:6]]
)
UNEVEN = [[0, 0, 0, 4], [0, 0, 4, 2]]
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another K": (
        lambda: split_k(TILES, 5, 2),
        r"schedule must be made for 6 steps of k, of 64 in k=328, got 5, which are those of k=257"
        " to 320",
    ),
    "another grid": (
        lambda: split_k(swizzle(3, 5), STEPS, 2),
        r"schedule is made for the grid \(3, 5\); legal are \(3, 4\) for tiles of \(64, 32\), .*"
        r"\(2, 5\) for mirrored tiles of \(64, 32\), .* others;",
    ),
    "another grid and K": (
        lambda: split_k(swizzle(3, 5), 7, 2),
        r"made for the grid \(3, 5\); legal are .* must be made for 6 steps of k, .* got 7",
    ),
    "pieces shorter than a step": (
        lambda: split_k(TILES, STEPS, 7),
        "parts must be at most the 6 steps of k, got 7",
    ),
    "a piece left out": (
        lambda: Pieces((3, 2), STEPS, split_k(TILES, STEPS, 2).table[:-1]),
        r"exactly once, got step 3 of tile \(2, \d\) 0 times",
    ),
    "a piece twice": (
        lambda: Pieces((3, 2), STEPS, split_k(TILES, STEPS, 2).table[[*range(12), 3]]),
        r"exactly once, got step 0 of tile \(\d, \d\) 2 times",
    ),
    "last pieces first": (
        lambda: Pieces((3, 2), STEPS, OTHER_ORDER),
        r"schedule must be pieces as split_k makes them: piece 0 of split_k\(..., steps=6, parts=2,"
        r" last=None\) is \[0, 0, 0, 3\], got \[0, 0, 3, 3\]",
    ),
    "uneven pieces": (
        lambda: Pieces((1, 1), STEPS, UNEVEN),
        r"pieces as split_k makes them: piece 0 of .* is \[0, 0, 0, 3\], got \[0, 0, 0, 4\]",
    ),
    "some tiles in more pieces": (
        lambda: Pieces(
            (1, 2),
            4,
            [[0, 0, 0, 2], [0, 1, 0, 2], [0, 0, 2, 2], *([0, 1, 2 + i, 1] for i in range(2))],
        ),
        r"split_k\(..., steps=4, parts=3, last=None\) makes 6 pieces of the tiles, got 5",
    ),
}


def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the product was traced")

    monkeypatch.setattr(product_p, "bind", traced)


@pytest.mark.parametrize("name", REFUSED)
def test_pieces_of_something_else_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, message = REFUSED[name]
    a, b = jnp.ones((M, K), jnp.bfloat16), jnp.ones((N, K), jnp.bfloat16)
    untraced(monkeypatch)
    with pytest.raises(ValueError, match=message):
        gemm(a, b, transpose_b=True, schedule=pieces())


@pytest.mark.parametrize("config", [ROWS_CUT, PAIRED_CUT], ids=lambda config: type(config).__name__)
def test_a_config_that_cuts_otherwise_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = jnp.ones((M, K), jnp.bfloat16), jnp.ones((N, K), jnp.bfloat16)
    untraced(monkeypatch)
    rows = -(-M // config.tile[0])
    tiles = swizzle(rows, 2)
    for changes, said in (
        ({}, "split_k=4 and split_last=None"),
        ({"split_last": 2}, "split_k=4 and split_last=2"),
        ({"split_k": 1}, "split_k=1 and split_last=None"),
    ):
        message = rf"schedule cuts tiles as split_k=3 and split_last=1 do, got {said}"
        with pytest.raises(ValueError, match=message):
            gemm(
                a,
                b,
                transpose_b=True,
                config=dataclasses.replace(config, **changes),
                schedule=split_k(tiles, STEPS, 3, 1),
            )
    with pytest.raises(ValueError, match=r"made for 6 steps of k, .* got 7, .* k=385 to 448"):
        gemm(a, b, transpose_b=True, config=config, schedule=split_k(tiles, 7, 4))
    with pytest.raises(ValueError, match=rf"made for the grid \({rows}, 2\), got \(9, 9\)"):
        gemm(
            a,
            b,
            transpose_b=True,
            config=config,
            schedule=split_k(build("raster", 9, 9), STEPS, 4),
        )


def test_what_is_not_cut_along_k_has_no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    untraced(monkeypatch)
    message = "schedule of a config must be an order of whole tiles, got Pieces: set split_k"
    with pytest.raises(TypeError, match=message):
        HopperConfig(schedule=split_k(TILES, STEPS, 2))  # type: ignore[arg-type]
    a = jnp.ones((M, K), jnp.bfloat16)
    with pytest.raises(ValueError, match="no meaning for implementation='xla'"):
        gemm(a, a, transpose_b=True, schedule=split_k(TILES, STEPS, 2), implementation="xla")


def test_groups_and_symmetric_results_are_not_cut() -> None:
    x, sizes = jnp.ones((256, 256), jnp.bfloat16), jnp.array([200, 56])
    cut, whole = (split_k(swizzle(2, 2), 4, parts) for parts in (2, 1))
    with pytest.raises(ValueError, match="split_k must be 1 for a symmetric result, got 2"):
        gram(x, schedule=cut)
    reference.assert_exact(
        gram(x, schedule=whole, implementation="interpret"), np.full((256, 256), 256)
    )
    with pytest.raises(ValueError, match="schedule must be a name or an OnlineSchedule for groups"):
        grouped_gemm(x, jnp.stack([x, x]), sizes, schedule=split_k(swizzle(3, 2), 4, 2))


def test_both_halves_of_a_gated_product_are_cut() -> None:
    rng = np.random.default_rng(1)
    a = reference.integers(rng, (M, K), jnp.bfloat16)
    gate, up = (reference.integers(rng, (N, K), jnp.bfloat16) for _ in range(2))
    # Tiles of 64 x 128 sums are 64 columns of the result.
    result = gated_gemm(
        a,
        gate,
        up,
        activation="relu",
        transpose_b=True,
        schedule=split_k(TILES, STEPS, 2),
        implementation="interpret",
    )
    reference.assert_exact(result, Formula(transpose_b=True, activation="relu")(a, gate, up=up))
