"""Tiles that all CTAs share: flags are awaited before sums are read that others have left."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan
from pallas_gemm.kernels.ptx import words
from tests import ptx_simulator
from tests.kernels.hopper.widened.test_widened_simulated import check, problem

ARRIVALS = "red.release"


class Sharing(WidenedPlan):
    """A plan whose CTAs share words though they are simulated."""

    shares_words = True


def share(ctas: int, tile: tuple[int, int] = (64, 16), *, transpose_b: bool = False) -> None:
    asked = problem(jnp.int4, 20, 320, 1152, group=128, transpose_b=transpose_b)
    config = WidenedConfig(
        tile=tile, along_k=2, stages=4, store_columns=16, ctas=ctas, persistence="static",
        shares_all=True,
    )  # fmt: skip
    check(asked, config, jnp.bfloat16, Sharing)


@pytest.fixture(autouse=True)
def _workers_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_simulator, "CONCURRENT", "pallas_gemm_widened")


@pytest.mark.each_value
@pytest.mark.parametrize("slow", ["", ARRIVALS])
@pytest.mark.parametrize(
    ("ctas", "tile", "transpose_b"),
    [(2, (64, 16), False), (3, (64, 16), True), (7, (128, 8), False), (5, (64, 24), False)],
)
def test_each_has_its_part(
    ctas: int, tile: tuple[int, int], transpose_b: bool, slow: str, monkeypatch: Any
) -> None:
    ptx_simulator.install(monkeypatch, ptx_simulator.Delays(slow=slow))
    share(ctas, tile, transpose_b=transpose_b)


@pytest.mark.parametrize("forgotten", ["arrive", "await_arrivals"])
def test_a_flag_that_nobody_sets_or_awaits_is_noticed(forgotten: str, monkeypatch: Any) -> None:
    ptx_simulator.install(monkeypatch, ptx_simulator.Delays(slow=ARRIVALS))
    monkeypatch.setattr(words, forgotten, lambda *_: None)
    # It is a race, or all wait for ever.
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        share(3)
