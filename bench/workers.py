"""Lowers kernels in other processes, while this one measures.

To lower a kernel takes Python a third of a second. The threads of a process do it one after the
other, and every launch has to wait meanwhile. A worker process, which leaves the GPU alone, returns
bytes that this one has only to compile, and the compiler needs no Python.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any, Self

import jax

from pallas_gemm import offline
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels.functions import activations
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import autotune as tuning
from pallas_gemm.tuning import trials

Runner = Callable[..., Any]

CAPABILITY = (9, 0)
"""The target that JAX lowers kernels for in a process without a GPU."""

MOST_WORKERS = 12
"""More take memory, and are not faster than one GPU."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function in a form that can be sent to another process.

    Attributes:
        make: A function of a module that makes it.
        args: The arguments of `make`.
        operands: The function's arguments: trees of `jax.ShapeDtypeStruct`.
    """

    make: Callable[..., Callable[..., Any]]
    args: tuple[Any, ...]
    operands: tuple[Any, ...]

    def compiled(self) -> Runner:
        """Compiles it in this process."""
        return jax.jit(self.make(*self.args)).lower(*self.operands).compile()


class Workers:
    """Processes that lower programs. `with Workers() as workers:` ends them.

    Args:
        processes: The number of workers; by default the cores to spare.
        platform: JAX's name of the platform to compile for.
    """

    def __init__(self, processes: int | None = None, platform: str = "cuda") -> None:
        self._platform = platform
        self._processes = processes or min(MOST_WORKERS, max(1, (os.cpu_count() or 2) - 2))
        self._pool = concurrent.futures.ProcessPoolExecutor(
            self._processes,
            # A fork of a process that has threads may hang.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_leave_the_gpu_alone,
        )

    def __enter__(self) -> Self:
        """Starts the processes, which takes them some seconds."""
        # A process is started for each task that finds none idle.
        for _ in range(self._processes):
            self._pool.submit(os.getpid)
        return self

    def __exit__(self, *error: object) -> None:
        """Ends them, whatever they are at."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def build(self, program: Program) -> Runner:
        """Compiles a program for this process.

        A function that cannot be sent or lowered elsewhere is lowered here, with the error of here.
        """
        return self.begin(program)()

    def begin(self, program: Program) -> Callable[[], Runner]:
        """Lowers a program elsewhere; returns what waits for that, and compiles it here."""
        lowering = self._pool.submit(_lowered, program, self._platform)

        def finish() -> Runner:
            try:
                lowered = lowering.result()
            except concurrent.futures.CancelledError:
                # The workers were ended, and nobody wants it any more.
                raise
            except Exception:
                return program.compiled()
            leaves = jax.tree.leaves(program.operands)
            run = jax.jit(jax.export.deserialize(bytearray(lowered)).call).lower(*leaves).compile()
            return lambda *operands: run(*jax.tree.leaves(operands))

        return finish

    def build_kernel(self, problem: Problem, config: GemmConfig, device: Device) -> Runner:
        """Compiles the kernel of a config: what tuning needs."""
        program = kernel_program(problem, config, device)
        return (
            self.build(program) if device.compute_capability == CAPABILITY else program.compiled()
        )


def kernel_program(problem: Problem, config: GemmConfig, device: Device) -> Program:
    """Returns the kernel of a config as a program."""
    operands = trials.operand_shapes(problem).present()
    return Program(_kernel, (sendable_problem(problem), config, sendable_device(device)), operands)


def sendable_device(device: Device) -> Device:
    """Returns an equal device that can be sent: `pickle` takes no read-only tables."""
    machine = device.machine
    clusters = dict(machine.resident_clusters)
    return dataclasses.replace(
        device, machine=dataclasses.replace(machine, resident_clusters=clusters)
    )


def sendable_problem(problem: Problem) -> Problem:
    """Returns the problem with its activation by name: `pickle` takes few of JAX's functions."""
    given = problem.epilogue.activation
    names = (name for name, known in activations.ACTIVATIONS.items() if known is given)
    sent: Any = next(names, given)
    epilogue = dataclasses.replace(problem.epilogue, activation=sent)
    return dataclasses.replace(problem, epilogue=epilogue)


def received_problem(problem: Problem) -> Problem:
    """Returns the problem that `sendable_problem` was given."""
    activation = activations.resolve(problem.epilogue.activation)
    epilogue = dataclasses.replace(problem.epilogue, activation=activation)
    return dataclasses.replace(problem, epilogue=epilogue)


def _kernel(problem: Problem, config: GemmConfig, device: Device) -> Callable[..., jax.Array]:
    return tuning.kernel(received_problem(problem), config, device)


def _leave_the_gpu_alone() -> None:
    """Lets a new process neither take memory of the GPU nor hear what the user tells this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jax.config.update("jax_platforms", "cpu")


def _lowered(program: Program, platform: str) -> bytes:
    function = program.make(*program.args)
    return bytes(offline.exported(function, *program.operands, platform=platform))
