"""What a proof runs: every mode in order of growing trust, and nothing wrong gets past it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from pallas_gemm.computer import occupancy
from pallas_gemm.device import B200, DEVICES, H200, Device
from pallas_gemm.kernels.blackwell.config import PAIR
from pallas_gemm.planning.architectures import ARCHITECTURES, Architecture, architecture_of
from pallas_gemm.problem import Problem
from pallas_gemm.proving import neighbour, worker
from pallas_gemm.proving.stages import RUNGS, Case, Stage, stages
from tests.computer.test_occupancy import SHARED_BYTES, StandIn

HOPPER, BLACKWELL = ARCHITECTURES


def of(device: Device) -> dict[str, Stage]:
    architecture = architecture_of(device)
    assert architecture is not None
    return {stage.name: stage for stage in stages(architecture, device)}


def test_trust_grows() -> None:
    configs: list[Any] = list(RUNGS["blackwell"].values())
    dynamic = [config.persistence == "dynamic" for config in configs]
    assert dynamic == sorted(dynamic)
    for persistence in ("none", "static", "dynamic"):
        pairs = [c.cluster == PAIR for c in configs if c.persistence == persistence]
        assert pairs == sorted(pairs)
        assert set(pairs) == {False, True}
    names = list(of(B200))
    assert names[: len(configs)] == list(RUNGS["blackwell"])
    assert [of(B200)[name].how for name in names[-4:]] == [*["replayed"] * 2, "beside", "checked"]


@pytest.mark.parametrize("name", ["b200", "b300", "h20", "h100_pcie"])
def test_every_layout_edge_and_type_is_there(name: str) -> None:
    found, capability = of(DEVICES[name]), DEVICES[name].compute_capability
    for stage in found.values():
        assert stage.cases
        for case in stage.cases:
            assert not case.config.refusals(case.problem, DEVICES[name])
    for rung in RUNGS[architecture_name(name)]:
        cases = found[rung].cases
        assert {case.problem.layout for case in cases} == {"NN", "NT", "TN", "TT"}
        assert len(cases) >= 4 if "cut along k" in rung else len(cases) == 7
    operands = {case.problem.a_dtype.name for case in found["types"].cases}
    wanted = {"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"}
    wanted |= {"int8"} if capability != (10, 3) else set()
    assert operands == wanted | ({"float32"} if capability == (9, 0) else set())


def architecture_name(name: str) -> str:
    return "hopper" if DEVICES[name].compute_capability == (9, 0) else "blackwell"


@pytest.mark.parametrize("device", [B200, H200], ids=lambda device: device.kind)
def test_tile_counts_lie_around_multiples_of_the_workers(device: Device) -> None:
    stages = [stage for stage in of(device).values() if stage.how == "replayed"]
    assert len(stages) == 3
    for case in [case for stage in stages for case in stage.cases]:
        tiles = math.prod(case.config.stacked_grid(case.problem))
        many = dataclasses.replace(case.problem, m=2**20)
        workers = case.config.workers(many, device)
        assert min(tiles % workers, -tiles % workers) <= 1
        assert tiles in range(workers - 1, 2 * workers + 2)


def by(kernel: Any) -> Architecture:
    """A kernel of our own making."""
    return dataclasses.replace(BLACKWELL, build=lambda *_: kernel)


PLAIN = Case(Problem(24, 40, 16), RUNGS["blackwell"]["one CTA, roles"])


def test_a_right_product_is_exact_however_often() -> None:
    assert worker.prepared(PLAIN, by(jnp.matmul), B200, replays=20)() == 0


def test_half_of_a_symmetric_result_is_that_of_one_array() -> None:
    for device in (B200, H200):
        assert len(of(device)["half of a symmetric result"].cases) >= 2
    gram = Case(Problem(24, 24, 16, transpose_b=True, symmetric="gram"), PLAIN.config)
    kernel = by(lambda a, _: jnp.matmul(a, a.T))
    assert worker.prepared(gram, kernel, B200, replays=0)() == 0


def test_wrong_elements_are_counted() -> None:
    for value in (99.0, jnp.nan):
        kernel = by(lambda a, b, value=value: jnp.matmul(a, b).at[3, :5].set(value))
        assert worker.prepared(PLAIN, kernel, B200, replays=0)() == 5


def test_a_replay_that_goes_wrong_is_counted() -> None:
    calls = iter(range(10**6))

    def now_and_then(a: jax.Array, b: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), jnp.bfloat16)
        extra = jax.pure_callback(
            lambda _: np.asarray(next(calls) % 7 == 6, jnp.bfloat16), shape, a[0, 0]
        )
        return jnp.matmul(a, b) + extra

    assert worker.prepared(PLAIN, by(now_and_then), B200, replays=21)() == 3


def test_what_is_still_in_memory_is_no_result() -> None:
    def nothing(a: jax.Array, _: jax.Array) -> jax.Array:
        return jnp.ones((24, 40), a.dtype)

    count = worker.replayed(nothing, 10)(jnp.ones((24, 40)), [jnp.ones((24, 16)), jnp.ones(())])
    assert int(count) == 5


def test_a_stage_says_where_it_is_and_stops_at_the_first_fault() -> None:
    told: list[Any] = []
    stage = Stage("one", (PLAIN, PLAIN))
    assert worker.run(stage, by(jnp.matmul), B200, told.append)
    assert told[0]["begins"].startswith("1 x 24 x 40 x 16 NN bfloat16 x bfloat16 -> bfloat16 Black")
    assert told[-1] == {"done": 2, "replays": 0, "note": ""}
    told.clear()
    assert not worker.run(stage, by(lambda a, b: -jnp.matmul(a, b) - 1), B200, told.append)
    assert [*map(list, told)] == [["begins"], ["wrong"]]


def test_a_kernel_is_run_as_the_stage_says() -> None:
    dealt: Any = RUNGS["hopper"]["tiles dealt"]
    config = dataclasses.replace(dealt, tile=(64, 64), consumers=1, ctas=2)
    case = Case(Problem(64, 64, 64, transpose_b=True), config)
    simulator = mosaic_gpu.InterpretGPUParams()
    simulated = dataclasses.replace(
        HOPPER, build=lambda p, config, device, _: HOPPER.build(p, config, device, simulator)
    )
    assert worker.prepared(case, simulated, H200, replays=0)() == 0


def test_a_kernel_of_higher_priority_wants_every_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []

    class Driver(StandIn):
        def call(self, name: str, *arguments: Any) -> int:
            if name == "cuCtxGetStreamPriorityRange":
                arguments[1]._obj.value = -5
            if name == "cuStreamCreateWithPriority":
                launches.append(("priority", arguments[2].value))
            if name == "cuLaunchKernel":
                launches.append(tuple(x.value for x in arguments[1:8]))
            return super().call(name, *arguments)

    library = Driver()
    monkeypatch.setattr(occupancy.ctypes, "CDLL", lambda _: library)
    with neighbour.beside(0) as launched:
        while not launched():
            pass
    assert launches[0] == ("priority", -5)
    assert launches[1] == (neighbour.BLOCKS, 1, 1, occupancy.THREADS, 1, 1, SHARED_BYTES)
    assert library.calls.count("cuModuleUnload") == library.calls.count("cuStreamDestroy_v2") == 1
    failing = Driver(failing="cuLaunchKernel", code=1)
    monkeypatch.setattr(occupancy.ctypes, "CDLL", lambda _: failing)
    with pytest.raises(occupancy.DriverError, match="cuLaunchKernel failed"), neighbour.beside(0):
        pass
