"""Who exchanges which rows with whom, and which products are refused."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_gemm import target
from pallas_gemm.api.collective import all_gather_gemm, gemm_reduce_scatter
from pallas_gemm.call import Call, Options
from pallas_gemm.device import H200
from pallas_gemm.kernels.exchange import ALONE, Exchange
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.devices import collective, send_rows
from pallas_gemm.op.mesh import fused_collective
from pallas_gemm.planning import plans
from pallas_gemm.problem import Problem

MESH = (("data", 2), ("model", 4))
LINE = Exchange((("model", 4),), ("model",), gathers=True)
BF16 = np.dtype(jnp.bfloat16)
PROBLEM = Problem(m=2048, n=1024, k=1024, a_dtype=BF16, b_dtype=BF16, out_dtype=BF16)
CONFIG = HopperConfig(tile=(128, 128), late_store=False)


def _owners(exchange: Exchange) -> np.ndarray:
    """Returns `[turn, rank]`."""
    ranks = range(exchange.size)
    return np.array(
        [[int(exchange.owner(jnp.int32(rank), turn)) for rank in ranks] for turn in ranks]
    )


@pytest.mark.parametrize("gathers", [True, False])
def test_every_device_has_another_ones_rows_at_each_turn(gathers: bool) -> None:
    owners = _owners(dataclasses.replace(LINE, gathers=gathers))
    everybody = np.arange(LINE.size)
    np.testing.assert_array_equal(np.sort(owners, axis=0), np.stack([everybody] * 4, axis=1))
    np.testing.assert_array_equal(np.sort(owners, axis=1), np.stack([everybody] * 4))
    # Its own rows are there first, and need not be sent last.
    np.testing.assert_array_equal(owners[0 if gathers else -1], everybody)


def test_sizes() -> None:
    assert ALONE.size == 1
    assert LINE.size == 4
    assert Exchange(MESH, ("data",), gathers=False).size == 2
    assert Exchange(MESH, ("data", "model"), gathers=False).size == 8


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("axes", [("model",), ("data",), ("data", "model"), ("model", "data")])
def test_devices_are_numbered_as_in_the_mesh(
    axes: tuple[str, ...], by_number: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, sizes = {"data": 1, "model": 2}, dict(MESH)
    module = "pallas_gemm.kernels.exchange"
    monkeypatch.setattr(f"{module}.lax.axis_index", lambda name: here[name])
    monkeypatch.setattr(f"{module}.numbered", lambda: by_number)
    exchange = Exchange(MESH, axes, gathers=False)
    for rank, places in enumerate(np.ndindex(*(sizes[axis] for axis in axes))):
        among = dict(zip(axes, places, strict=True))
        place = here | among
        number = place["data"] * sizes["model"] + place["model"]
        assert exchange.device(jnp.int32(rank)) == (number if by_number else among)


def test_loads_cover_all_rows() -> None:
    together = send_rows.BLOCK_BYTES * send_rows.LOAD
    assert [send_rows.loads(size) for size in (1, together, together + 1)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("problem", "config", "gathers", "why"),
    [
        ({}, {}, True, None),
        ({}, {}, False, None),
        ({"m": 2050}, {}, False, "2050 in all, are no whole tiles"),
        ({"m": 1920}, {}, True, "1920 in all, are no whole tiles"),
        ({}, {"tile": (256, 128), "cluster": (4, 1)}, False, "no whole tiles"),
        ({}, {"mirrored": True}, False, "computed transposed"),
        ({"transpose_a": True}, {}, True, "512 x 1024 elements are not sent"),
        ({"m": 512, "k": 1036}, {}, True, "128 x 1036 elements are not sent"),
        ({}, {"persistence": "dynamic"}, True, "not yet running"),
        ({"m": 512, "n": 1032}, {}, False, "128 x 1032 sums are not added up"),
    ],
)
def test_what_is_refused(
    problem: dict[str, Any], config: dict[str, Any], gathers: bool, why: str | None
) -> None:
    found = collective.refusals(
        dataclasses.replace(PROBLEM, **problem),
        dataclasses.replace(CONFIG, **config),
        dataclasses.replace(LINE, gathers=gathers),
    )
    assert not list(found) if why is None else why in next(found)


def _for_gpus(devices: Sequence[jax.Device], k: int, collective: Any) -> str:
    """Returns a collective product of bfloat16 as it is lowered for a mesh of GPUs."""
    rows, columns = P("x", None), P(None, "x")
    specs = (rows, columns) if collective is all_gather_gemm else (columns, rows)
    product = jax.shard_map(
        functools.partial(collective, axis_name="x"),
        mesh=Mesh(np.array(devices), ("x",)),
        in_specs=specs,
        out_specs=specs[1],
        check_vma=False,
    )
    operands = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((8192, k), (k, 8192)))
    with target("h200"):
        return jax.jit(product).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(
    ("collective", "sent", "odd"),
    [
        (all_gather_gemm, "stablehlo.all_gather", 8191),
        (gemm_reduce_scatter, "stablehlo.reduce_scatter", 4 * 8191),
    ],
    ids=["gathered", "scattered"],
)
def test_the_kernel_sends_only_what_it_may(collective: Any, sent: str, odd: int) -> None:
    devices = jax.devices()[:4]
    by_kernel = _for_gpus(devices, 8192, collective)
    assert sent not in by_kernel
    assert "mosaic_gpu" in by_kernel
    # In another order, devices are not numbered as in the mesh.
    assert sent in _for_gpus(devices[::-1], 8192, collective)
    # Odd rows are padded first.
    padded = _for_gpus(devices, odd, collective)
    assert sent in padded
    assert "mosaic_gpu" in padded


@pytest.mark.parametrize(
    ("collective", "kernels"), [(all_gather_gemm, 1), (gemm_reduce_scatter, 2)]
)
def test_xla_is_told_that_a_kernel_asks_for_its_device(collective: Any, kernels: int) -> None:
    """Such a kernel starts on all devices at a time: what the kernels before stored is there."""
    by_kernel = _for_gpus(jax.devices()[:4], 8192, collective)
    assert by_kernel.count("uses_xla_collective_metadata = true") == kernels
    assert "uses_xla_collective_metadata = false" not in by_kernel


@pytest.mark.parametrize(
    ("dtype", "rows", "why"),
    [
        (jnp.bfloat16, 2048, None),
        (jnp.bfloat16, 64, "the rows of 4 devices, 64 in all, are no whole tiles"),
        (jnp.complex64, 2048, "no kernel takes it"),
    ],
    ids=["exchanged", "too few rows", "no kernel"],
)
def test_what_no_kernel_computes_has_a_reason(dtype: Any, rows: int, why: str | None) -> None:
    call = Call(np.dtype(dtype), options=Options(target=H200))
    whole = tuple((shape, np.dtype(dtype)) for shape in ((rows, 1024), (1024, 1024)))
    found = fused_collective._planned(call, whole, LINE)
    assert isinstance(found, plans.Plan) if why is None else found == why


@pytest.mark.parametrize(("devices", "why"), [(1, "there is one device"), (2, None)])
def test_two_devices_are_enough_to_exchange_rows(devices: int, why: str | None) -> None:
    call = Call(BF16, options=Options(target=H200))
    whole = tuple((shape, BF16) for shape in ((2048, 1024), (1024, 1024)))
    line = dataclasses.replace(LINE, mesh=(("model", devices),))
    found = fused_collective._planned(call, whole, line)
    assert isinstance(found, plans.Plan) if why is None else found == why
