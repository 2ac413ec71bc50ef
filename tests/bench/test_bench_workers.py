"""Kernels lowered by other processes: what is sent, what comes back, what is done here."""

import dataclasses
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import contest, peers, products, workers
from bench.shapes import Case
from bench.workers import Program, Workers
from pallas_gemm import offline
from pallas_gemm.device import B200, H200, Device
from pallas_gemm.kernels.functions import activations
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.tuning import space as tuning_space
from pallas_gemm.tuning import trials
from tests import reference

CASE = Case(64, 32, 128)
PLAIN = Program(products.plain, (CASE,), (products.operand_shapes(CASE),))


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    """One process that lowers for the CPU, on which its programs can then run."""
    with Workers(1, "cpu") as found:
        yield found


def _capability() -> tuple[int, int]:
    from jax.experimental.mosaic.gpu import utils

    arch = utils.get_arch()
    return arch.major, arch.minor


def sent(program: Program) -> Program:
    return pickle.loads(pickle.dumps(program))


def test_what_another_process_lowered_computes_the_same(pool: Workers) -> None:
    operands = products.make_operands(CASE, jax.random.key(0))
    before = pool._pool.submit(workers._lowered, PLAIN, "cpu").result()
    assert isinstance(before, bytes)
    (elsewhere,) = pool.build(PLAIN)(operands)
    (here,) = PLAIN.compiled()(operands)
    np.testing.assert_array_equal(reference.wide(elsewhere), reference.wide(here))


def test_all_workers_are_started_at_once() -> None:
    with Workers(3, "cpu") as found:
        assert len(found._pool._processes) == 3


def test_what_cannot_be_sent_is_lowered_here(pool: Workers) -> None:
    made = []

    def make() -> Callable[[Any], Any]:
        made.append(None)
        return jnp.negative

    run = pool.build(Program(make, (), (jax.ShapeDtypeStruct((2,), jnp.float32),)))
    np.testing.assert_array_equal(run(jnp.ones(2)), -np.ones(2))
    assert made == [None]


def test_an_error_is_that_of_this_process(pool: Workers) -> None:
    wrong = dataclasses.replace(PLAIN, operands=(jax.ShapeDtypeStruct((2,), jnp.float32),))
    with pytest.raises(Exception) as here:  # noqa: PT011 - whatever it is
        wrong.compiled()
    with pytest.raises(type(here.value)):
        pool.build(wrong)


def test_workers_leave_the_gpu_and_the_keyboard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(jax.config, "update", lambda *change: seen.append(change))
    monkeypatch.setattr(signal, "signal", lambda *change: seen.append(change))
    workers._leave_the_gpu_alone()
    assert seen == [(signal.SIGINT, signal.SIG_IGN), ("jax_platforms", "cpu")]


@pytest.mark.parametrize("name", [None, *activations.ACTIVATIONS])
def test_a_problem_arrives_as_it_was_sent(name: str | None) -> None:
    epilogue = Epilogue(activation=activations.resolve(name))
    problem = Problem(8, 64, 16, jnp.float8_e4m3fn, jnp.float8_e5m2, epilogue=epilogue)
    received = workers.received_problem(
        pickle.loads(pickle.dumps(workers.sendable_problem(problem)))
    )
    assert received == problem
    assert received.epilogue.activation is epilogue.activation


def test_a_device_arrives_as_it_was_sent() -> None:
    assert H200.machine.resident_clusters
    assert pickle.loads(pickle.dumps(workers.sendable_device(H200))) == H200


def test_every_config_that_is_tuned_can_be_sent_and_lowered() -> None:
    gated = Epilogue(gated=True, activation=activations.ACTIVATIONS["silu"])
    problem = Problem(512, 1024, 256, epilogue=gated)
    configs = tuning_space.configs(problem, H200, ARCHITECTURES[0])
    programs = [sent(workers.kernel_program(problem, config, H200)) for config in configs]
    lowered = jax.export.deserialize(bytearray(workers._lowered(programs[0], "cuda")))
    assert "mosaic_gpu" in lowered.mlir_module()
    shapes = [(aval.shape, aval.dtype) for aval in lowered.in_avals]
    assert shapes == [(x.shape, x.dtype) for x in trials.operand_shapes(problem).present()]


def test_what_was_made_longer_for_a_kernel_is_lowered_as_the_kernel_takes_it() -> None:
    epilogue = Epilogue(bias=True, residual=True)
    longer = Problem(512, 320, 256, epilogue=epilogue, kept=(509, 257))
    config = tuning_space.configs(longer, H200, ARCHITECTURES[0])[0]
    program = sent(workers.kernel_program(longer, config, H200))
    lowered = jax.export.deserialize(bytearray(workers._lowered(program, "cuda")))
    assert [aval.shape for aval in lowered.in_avals] == [(512, 256), (256, 320), (257,), (509, 264)]
    assert [aval.shape for aval in lowered.out_avals] == [(509, 257)]


def test_jaxs_kernel_is_lowered_for_a_gpu_that_its_process_lacks() -> None:
    case = Case(1024, 1024, 512)
    choice = peers.JaxHopperChoice((128, 128), "M", "N", "N", 8)
    program = sent(Program(peers._jax_formula, (choice, 132), (products.operand_shapes(case),)))
    report = offline.compile_report(program.make(*program.args), *program.operands, target="h200")
    assert np.prod(report.grid) == 132


def test_our_kernel_is_lowered_as_it_is_compiled_here() -> None:
    config = tuning_space.configs(CASE.problem, H200, ARCHITECTURES[0])[0]
    (candidate,) = peers.Kernel([config], H200).candidates(CASE)
    assert candidate.program is not None
    program = sent(candidate.program)
    report = offline.compile_report(program.make(*program.args), *program.operands, target="h200")
    assert report.kernel.startswith("pallas_gemm")


@pytest.mark.parametrize(
    ("device", "elsewhere"), [(H200, True), (B200, False)], ids=["H200", "B200"]
)
def test_kernels_are_lowered_elsewhere_only_for_what_jax_then_takes_the_gpu_for(
    device: Device, elsewhere: bool, monkeypatch: pytest.MonkeyPatch, pool: Workers
) -> None:
    places = []
    monkeypatch.setattr(pool, "build", lambda _: places.append("elsewhere"))
    monkeypatch.setattr(Program, "compiled", lambda _: places.append("here"))
    pool.build_kernel(Problem(256, 256, 256), HopperConfig(), device)
    assert places == ["elsewhere" if elsewhere else "here"]
    assert pool._pool.submit(_capability).result() == workers.CAPABILITY


def test_candidates_that_are_programs_are_lowered_elsewhere() -> None:
    class Pool(Workers):
        def __init__(self) -> None:
            self.seen: list[Program] = []

        def build(self, program: Program) -> workers.Runner:
            self.seen.append(program)
            return program.compiled()

    class Ours(peers.JaxPeer):
        name = "ours"

        def candidates(self, case: Case) -> list[peers.Candidate]:
            return [
                peers.Candidate.of("sent", PLAIN),
                peers.Candidate("not sent", lambda: peers.compiled(products.plain(case), case)),
            ]

    def ignore(*_: object) -> None:
        pass

    pool = Pool()
    passed, dropped = contest.contenders(
        CASE, [peers.Xla(), Ours()], cold=False, start=ignore, advance=lambda: None, pool=pool
    )
    assert [(one.peer, one.label) for one in passed] == [
        ("xla", ""),
        ("ours", "sent"),
        ("ours", "not sent"),
    ]
    assert (dropped, pool.seen) == ([], [PLAIN])
