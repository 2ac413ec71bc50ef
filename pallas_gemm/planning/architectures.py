"""The GPU architectures that there are kernels for, and what planning has to know of each."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from pallas_gemm.config import GemmConfig
from pallas_gemm.device import B200, H200, Device
from pallas_gemm.kernels.blackwell import config as blackwell_config
from pallas_gemm.kernels.blackwell.plan import BlackwellPlan
from pallas_gemm.kernels.hopper import config as hopper_config
from pallas_gemm.kernels.hopper import problems as hopper_problems
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.widened import problems as widened_problems
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.kernels.windows import WHOLE, Window
from pallas_gemm.planning.candidates import blackwell as blackwell_candidates
from pallas_gemm.planning.candidates import hopper as hopper_candidates
from pallas_gemm.planning.candidates import widened as widened_candidates
from pallas_gemm.planning.candidates.draft import Draft, complete
from pallas_gemm.problem import Problem


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A generation of GPUs, and its kernel.

    Attributes:
        name: The name that `implementation=` has for the kernel.
        capability: The first number of its compute capability, or both where only one will do.
        flops_per_cycle: Operations that the tensor cores of an SM do with 16-bit operands; half of
            it with 32 bits, twice with 8.
        example: A GPU to plan for when nothing else is known.
        config: The class of the kernel's configs.
        problem_refusals: Why the kernel cannot take a problem on a GPU, whatever the config.
        drafts: The heuristics consider these drafts of configs for a problem. Where tiles are to be
            cut along k in one way, all of them cut tiles so.
        build: Makes the function of the operands from problem, config, device and the simulator's
            parameters (False on a GPU), and where it takes parts of larger arrays from their window
            (`windows.py`). It imports the kernel, and with it 1.3 s of JAX's compiler for kernels
            that a program without a kernel does not need.
        row_cycles: Cycles of TMA for each row of `STEP_BYTES` that a CTA loads.
        gpc_bytes_per_cycle: Bytes that the tiles of one GPC read from the L2. Bytes that several of
            them read at a time count once.
        fitted: Predictions were fitted to what was measured, so that they say something beside
            XLA's time. Others choose among configs only.
        collective: Imports the module by which its kernel exchanges rows with other devices, which
            has `refusals` and `build`; None if it does not.
        needs_proof: Nobody has run it yet: it is taken unasked only where it was proven.
        seconds: Predicts the time of a config; None if `prediction.py` does.
        takes_parts: Its kernel takes parts of larger arrays.
        tuned: Configs of its kernel are tuned, and looked up in tables.
    """

    name: str
    capability: tuple[int, ...]
    flops_per_cycle: int
    example: Device
    config: type[GemmConfig]
    problem_refusals: Callable[[Problem, Device], Iterable[str]]
    drafts: Callable[..., Iterable[Draft[Any]]]
    build: Callable[..., Callable[..., Any]]
    row_cycles: float = 0.0
    gpc_bytes_per_cycle: float = math.inf
    fitted: bool = False
    collective: Callable[[], Any] | None = None
    needs_proof: bool = False
    seconds: Callable[[Problem, Any, Device], float] | None = None
    takes_parts: bool = False
    tuned: bool = True

    def fits(self, device: Device) -> bool:
        """Whether the kernel's instructions exist on a GPU."""
        return device.compute_capability[: len(self.capability)] == self.capability


def _build_hopper(
    problem: Problem, config: Any, device: Device, interpret: Any, window: Window = WHOLE
) -> Any:
    from pallas_gemm.kernels.hopper import kernel

    return kernel.build(HopperPlan(problem, config, device, window=window, interpret=interpret))


def _build_widened(problem: Problem, config: Any, device: Device, interpret: Any) -> Any:
    from pallas_gemm.kernels.hopper.widened import kernel
    from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan

    if interpret and config.ctas_along_k > 1:
        raise ValueError(
            "config: the simulator knows no shared memory of a cluster; ctas_along_k must be 1 to"
            f" be simulated, got {config.ctas_along_k}"
        )
    return kernel.build(WidenedPlan(problem, config, device, interpret=interpret))


def _hopper_among_devices() -> Any:
    from pallas_gemm.kernels.hopper.devices import collective

    return collective


def _build_blackwell(problem: Problem, config: Any, device: Device, interpret: Any) -> Any:
    from pallas_gemm.kernels.blackwell import kernel

    if interpret and config.cluster == blackwell_config.PAIR:
        raise ValueError(
            "config: the simulator knows no pairs of CTAs; cluster must be (1, 1) to be"
            f" simulated, got {config.cluster}"
        )
    return kernel.build(BlackwellPlan(problem, config, device, interpret=interpret))


# WGMMA exists on 9.0 alone; the tensor memory of Blackwell's data-centre GPUs on every 10.x, but
# not on 12.x.
ARCHITECTURES = (
    Architecture(
        "hopper",
        (9, 0),
        4096,
        H200,
        hopper_config.HopperConfig,
        lambda problem, _: hopper_problems.refusals(problem),
        hopper_candidates.drafts,
        _build_hopper,
        row_cycles=1.3,
        gpc_bytes_per_cycle=490.0,
        fitted=True,
        collective=_hopper_among_devices,
        takes_parts=True,
    ),
    Architecture(
        "blackwell",
        (10,),
        8192,
        B200,
        blackwell_config.BlackwellConfig,
        blackwell_config.problem_refusals,
        complete(blackwell_candidates.candidates),
        _build_blackwell,
        # Each CTA of a pair loads half of the right operand: one CTA with tiles of 128 x 256 is
        # then 6% slower, as in JAX's tutorial on a B200. With Hopper's way to the L2, two CTAs
        # would read no more than a pair does, which by the article on a B200 is 1.5 times as much.
        # Nobody has measured either.
        row_cycles=1.43,
        needs_proof=True,
    ),
)

WIDENED = Architecture(
    "hopper",
    (9, 0),
    4096,
    H200,
    WidenedConfig,
    lambda problem, _: widened_problems.refusals(problem),
    complete(widened_candidates.candidates),
    _build_widened,
    seconds=widened_candidates.seconds,
    tuned=False,
)
"""Hopper, with its kernel for weights that go through registers."""


def of_problem(problem: Problem, config: Any = None) -> tuple[Architecture, ...]:
    """Returns the architectures, each with its kernel for such a problem.

    Args:
        problem: The product.
        config: The config that is named, if one is: it says which of Hopper's kernels.
    """
    if not widened_problems.is_widened(problem) and not isinstance(config, WidenedConfig):
        return ARCHITECTURES
    return tuple(WIDENED if known.fits(H200) else known for known in ARCHITECTURES)


def architecture_of(device: Device) -> Architecture | None:
    """Returns whose kernel runs on a GPU, None if there is none."""
    return next((kind for kind in ARCHITECTURES if kind.fits(device)), None)
