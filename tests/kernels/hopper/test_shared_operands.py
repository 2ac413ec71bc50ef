"""Operands that products of a batch share: masks of an example, biases of a head."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import HopperConfig, gemm
from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.kernels.functions.split import split
from pallas_gemm.planning import implementation
from pallas_gemm.program import ALL, FIRST, LAST
from tests import races
from tests.reference import normal

pytestmark = pytest.mark.usefixtures("as_users_write")

M, N, K = 128, 64, 64
EXAMPLES, HEADS, GROUP = 2, 3, 2
CONFIG = HopperConfig(tile=(64, 64), stages=2, store_columns=32, consumers=1, late_store=False)
BF16, F32 = jnp.bfloat16, jnp.float32


LEADS = {
    "an example's": ((EXAMPLES, 1, 1), FIRST, (EXAMPLES,)),
    "a group's": ((EXAMPLES, HEADS, 1), FIRST, (EXAMPLES, HEADS)),
    "a head's": ((1, HEADS, GROUP), LAST, (HEADS, GROUP)),
    "a place's in a group": ((1, 1, GROUP), LAST, (GROUP,)),
    "a head of keys'": ((1, HEADS, 1), FIRST, (EXAMPLES, HEADS)),
    "all but a head's": ((EXAMPLES, 1, GROUP), ALL, (EXAMPLES, HEADS, GROUP)),
    "a product's": ((EXAMPLES, HEADS, GROUP), ALL, (EXAMPLES, HEADS, GROUP)),
    "everybody's": ((1, 1, 1), ALL, ()),
}
"""Leading dimensions, the end of the batch that they are, and what the kernel is handed."""


def _masked(s: Any, mask: Any) -> Any:
    z = jnp.where(mask, s, -8.0)
    return z.astype(BF16), jnp.max(z, -1)


def _added(s: Any, bias: Any) -> Any:
    z = s + bias.astype(F32)
    return z, jnp.sum(z, -2)


def _parts(function: Any, operand: jax.ShapeDtypeStruct) -> Split:
    sums = jax.ShapeDtypeStruct((EXAMPLES, HEADS, GROUP, M, N), F32)
    found = split(jax.make_jaxpr(function)(sums, operand), Names("bhgmn", "m", "n"))
    assert isinstance(found, Split)
    return found


@pytest.mark.parametrize("case", LEADS.values(), ids=LEADS)
def test_a_kernel_is_handed_no_copies(case: Any) -> None:
    lead, end, handed = case
    parts = _parts(_added, jax.ShapeDtypeStruct((*lead, M, N), BF16))
    (own,), (made,) = parts.program.operands, parts.types()
    assert own.batch == end
    assert made.shape == ((np.prod(handed), M, N) if handed else (M, N))
    copied = np.prod(lead) != np.prod(handed or 1)
    assert bool(parts.spread_bytes) == copied


def _check(lead: tuple[int, ...], function: Any, sizes: tuple[int, int, int], **how: Any) -> None:
    rng, (m, n, k) = np.random.default_rng(0), sizes
    a = normal(rng, (EXAMPLES, HEADS, GROUP, m, k), BF16)
    b = normal(rng, (EXAMPLES, HEADS, GROUP, k, n), BF16)
    operand = normal(rng, (*lead, m, n), BF16)
    operand = operand > 0 if function is _masked else operand
    found = gemm(a, b, epilogue=function, operands=(operand,), **how)
    expected = function(jnp.matmul(a, b, preferred_element_type=F32), operand)
    for x, y in zip(found, expected, strict=True):
        wide = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(*wide, rtol=1e-2, atol=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("function", [_masked, _added])
@pytest.mark.parametrize("lead", [lead for lead, _, _ in LEADS.values()], ids=LEADS)
def test_each_product_reads_its_own(
    lead: tuple[int, ...], function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    racing = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(implementation, "_simulator", lambda _: racing)
    with races.recorded() as raced:
        _check(lead, function, (M, N, K), implementation="interpret", config=CONFIG)
        assert not raced()


ON_A_GPU = {
    "early": HopperConfig(tile=(128, 128), stages=4, store_columns=32, late_store=False),
    "in turns": HopperConfig(
        tile=(128, 128), stages=4, pingpong=True, store_slots=1, store_columns=32, late_store=False
    ),
    "cluster": HopperConfig(
        tile=(128, 128), stages=4, cluster=(2, 1), store_columns=32, late_store=False
    ),
}


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize("config", ON_A_GPU.values(), ids=ON_A_GPU)
@pytest.mark.parametrize("function", [_masked, _added])
@pytest.mark.parametrize("lead", [lead for lead, _, _ in LEADS.values()], ids=LEADS)
def test_each_product_reads_its_own_on_a_gpu(
    lead: tuple[int, ...], function: Any, config: HopperConfig
) -> None:
    _check(lead, function, (392, 520, 192), config=config)
