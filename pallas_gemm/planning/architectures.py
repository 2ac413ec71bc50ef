"""The kernels that there are, one per GPU architecture, each loaded when it is first asked for."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from pallas_gemm.config import GemmConfig
from pallas_gemm.device import B200, H200, Device
from pallas_gemm.problem import Problem


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What dispatch has to know of a kernel.

    Attributes:
        config: The class of its configs.
        problem_refusals: Why it cannot take a problem on a GPU, whatever the config.
        candidates: The configs that the heuristics consider for a problem.
        shared_rows: Rows of `STEP_BYTES` that shared memory takes in and gives out per k step of a
            config, each operand as often as it is written or read.
        build: Makes the function of the operands from problem, config, device and the simulator's
            parameters (False on a GPU).
    """

    config: type[GemmConfig]
    problem_refusals: Callable[[Problem, Device], Iterable[str]]
    candidates: Callable[[Problem, Device], Iterable[GemmConfig]]
    shared_rows: Callable[[Any], int]
    build: Callable[[Problem, Any, Device, Any], Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A generation of GPUs.

    Attributes:
        name: What `implementation=` calls its kernel.
        capability: The first number of its compute capability, or both where only one will do.
        flops_per_cycle: What the tensor cores of an SM do with 16-bit operands; half of it with 32
            bits, twice with 8.
        example: A GPU to plan for when nothing else is known.
        load: Imports the kernel; raises `ImportError` where this version has none.
    """

    name: str
    capability: tuple[int, ...]
    flops_per_cycle: int
    example: Device
    load: Callable[[], Kernel]

    def fits(self, device: Device) -> bool:
        """Whether the kernel's instructions exist on a GPU."""
        return device.compute_capability[: len(self.capability)] == self.capability


@functools.cache
def _hopper() -> Kernel:
    from pallas_gemm.kernels.hopper import candidates as hopper_candidates
    from pallas_gemm.kernels.hopper import config as hopper_config
    from pallas_gemm.kernels.hopper import kernel as hopper
    from pallas_gemm.kernels.hopper import plan

    def build(problem: Problem, config: Any, device: Device, interpret: Any) -> Any:
        return hopper.build(plan.HopperPlan(problem, config, device), interpret=interpret)

    return Kernel(
        hopper_config.HopperConfig,
        lambda problem, _: hopper_config.problem_refusals(problem),
        hopper_candidates.candidates,
        hopper_candidates.shared_rows,
        build,
    )


@functools.cache
def _blackwell() -> Kernel:
    from pallas_gemm.kernels.blackwell import candidates as blackwell_candidates
    from pallas_gemm.kernels.blackwell import config as blackwell_config
    from pallas_gemm.kernels.blackwell import kernel as blackwell
    from pallas_gemm.kernels.blackwell import plan as blackwell_plan

    def build(problem: Problem, config: Any, device: Device, interpret: Any) -> Any:
        if interpret and config.cluster == blackwell_config.PAIR:
            raise ValueError(
                "config: the simulator knows no pairs of CTAs; cluster must be (1, 1) to be"
                f" simulated, got {config.cluster}"
            )
        plan = blackwell_plan.BlackwellPlan(problem, config, device)
        return blackwell.build(plan, interpret=interpret)

    return Kernel(
        blackwell_config.BlackwellConfig,
        blackwell_config.problem_refusals,
        blackwell_candidates.candidates,
        blackwell_candidates.shared_rows,
        build,
    )


# WGMMA exists on 9.0 alone; the tensor memory of Blackwell's data-centre GPUs on every 10.x, but
# not on 12.x.
ARCHITECTURES = (
    Architecture("hopper", (9, 0), 4096, H200, _hopper),
    Architecture("blackwell", (10,), 8192, B200, _blackwell),
)
