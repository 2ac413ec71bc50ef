"""Whom we are measured against, and ourselves: each a small adapter with the same face.

A peer says why it is absent here or why it refuses a case, and otherwise offers candidates: one
way to compute the case, or several of which the fastest is taken. Only what is installed is used.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax

import pallas_gemm
from bench import jax_ragged, workers
from bench.peer import Candidate, Peer, Runner, missing
from bench.products import Formula, Operands, Results, formula, operand_shapes, plain
from bench.shapes import Case
from bench.torch_peers import Quack, Torch, Triton
from bench.workers import Program
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.tuning import autotune as tuning
from pallas_gemm.tuning.outcome import config_label

CUDNN_OF_GROUPS = (9, 22)
"""The first release of cuDNN that computes rows in groups for XLA."""


class JaxPeer:
    """The base of all peers that are JAX programs."""

    name = "jax"
    threads = True

    def absent(self) -> str | None:
        """Returns None: JAX is there."""
        return None

    def refusal(self, case: Case) -> str | None:  # noqa: ARG002 - refuses nothing
        """Returns None: takes every case."""
        return None

    def adopt(self, operands: Operands) -> Any:
        """Returns the operands as they are."""
        return operands

    def wait(self, results: Any) -> None:
        """Returns when results have been computed."""
        jax.block_until_ready(results)

    def export(self, results: Any) -> Results:
        """Returns the results as they are."""
        return results


class Xla(JaxPeer):
    """`jnp.matmul` as XLA compiles it: cuBLAS or Triton, whichever its autotuner finds faster."""

    name = "xla"
    # Its autotuner times kernels on the GPU, and must not do so beside itself.
    threads = False

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns the one program that a user would write."""
        return [Candidate("", lambda: compiled(plain(case), case))]


class CudnnGroups(Xla):
    """Rows in groups by XLA's fusion of `lax.ragged_dot`, which cuDNN computes."""

    name = "cudnn"
    option = "xla_gpu_experimental_use_ragged_dot_fusion"

    def absent(self) -> str | None:
        """Returns why it cannot be used here, or None."""
        packages = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
        found = [version for package in packages if (version := _version(package))]
        if any(version >= CUDNN_OF_GROUPS for version in found):
            return None
        return f"cuDNN {'.'.join(map(str, CUDNN_OF_GROUPS))} or newer is not installed"

    def refusal(self, case: Case) -> str | None:
        """Returns why it cannot compute a case, or None."""
        return None if case.groups else "rows in groups only"

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns the program that a user would write, compiled with the option."""
        return [Candidate("", lambda: compiled(plain(case), case, {self.option: True}))]


class Tokamax(JaxPeer):
    """Rows in groups by tokamax, whose kernels have the arguments of `lax.ragged_dot`."""

    name = "tokamax"

    def absent(self) -> str | None:
        """Returns why it cannot be used here, or None."""
        return missing("tokamax", "tokamax")

    def refusal(self, case: Case) -> str | None:
        """Returns why it cannot compute a case, or None."""
        return None if case.groups else "rows in groups only"

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns each of its kernels for GPUs, with the config that it chooses."""
        return [
            Candidate(kernel, functools.partial(_tokamax, case, kernel))
            for kernel in ("mosaic", "triton")
        ]


class Op(JaxPeer):
    """`pallas_gemm.gemm` with whatever it chooses by itself."""

    name = "ours"

    def absent(self) -> str | None:
        """Returns why the op cannot be used, or None."""
        return None if hasattr(pallas_gemm, "gemm") else "this version has no pallas_gemm.gemm"

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns the one call."""
        return [Candidate("", lambda: compiled(fused(case), case))]


class Promised(Op):
    """The same under a promise: a row has the same bits among any others."""

    name = "rows"

    def refusal(self, case: Case) -> str | None:
        """Returns why nothing is promised of a case, or None."""
        return None if case.is_bare else "a bare product only"

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns the one call."""

        def build() -> Runner:
            with pallas_gemm.numerics(invariant="rows"):
                return compiled(fused(case), case)

        return [Candidate("", build)]


class Kernel(JaxPeer):
    """Our kernel itself, the best of given configurations."""

    def __init__(self, configs: Sequence[GemmConfig], device: Device, name: str = "kernel") -> None:
        self._configs = configs
        self._device = device
        self.name = name

    def refusal(self, case: Case) -> str | None:
        """Returns why no configuration can compute the case, or None."""
        if not case.is_bare:
            return "a bare product only"
        reasons = [config.refusals(case.problem, self._device) for config in self._configs]
        if not reasons:
            return "no configuration was given"
        return None if () in reasons else "; ".join(reasons[0])

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns a candidate for each configuration that can compute the case."""
        return [
            Candidate.of(config_label(config), self._program(case, config))
            for config in self._configs
            if not config.refusals(case.problem, self._device)
        ]

    def _program(self, case: Case, config: GemmConfig) -> Program:
        device = workers.sendable_device(self._device)
        return Program(_kernel_formula, (case, config, device), (operand_shapes(case),))


class JaxHopper(JaxPeer):
    """The Hopper example kernels that ship with JAX, the best of a grid of their own configs."""

    name = "jax"

    def __init__(self, *, full_grid: bool = False) -> None:
        self._full_grid = full_grid

    def absent(self) -> str | None:
        """Returns why it cannot be used here, or None."""
        modules = ("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu", *jax_ragged.MODULES)
        return next(filter(None, (missing(module, "jax") for module in modules)), None)

    def refusal(self, case: Case) -> str | None:
        """Returns why it cannot compute a case, or None."""
        if case.groups:
            return jax_ragged.refusal(case, full=self._full_grid)
        if case.dtype not in ("bf16", "f16"):
            return "16-bit types only"
        if case.layout != "NN" or case.batch > 1:
            return "row-major operands without a batch only"
        if not case.is_bare:
            return "a bare product only"
        return None if self.candidates(case) else "sizes must be multiples of its tiles"

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns a candidate for each of its configs that divides the case."""
        if case.groups:
            return [
                Candidate.of(
                    choice.label,
                    Program(jax_ragged.formula, (case, choice), (operand_shapes(case),)),
                )
                for choice in jax_ragged.choices(case, full=self._full_grid)
            ]
        choices = [choice for choice in self._grid(case) if choice.divides(case)]
        # What its kernel would ask this process's device.
        sms = getattr(jax.devices()[0], "core_count", None)
        return [
            Candidate.of(
                choice.label, Program(_jax_formula, (choice, sms), (operand_shapes(case),))
            )
            for choice in choices
        ]

    def _grid(self, case: Case) -> list["JaxHopperChoice"]:
        large = case.m * case.n >= 132 * 256 * 128
        tiles = [(128, 128)] if large else [(128, 128), (64, 128), (64, 64)]
        clusters = (None, "M", "N")
        widths = (1, 4, 8, 16) if self._full_grid else (8,)
        minors = ("M", "N") if self._full_grid else ("N",)
        return list(
            itertools.starmap(
                JaxHopperChoice, itertools.product(tiles, ("M", "N"), clusters, minors, widths)
            )
        )


@dataclasses.dataclass(frozen=True)
class JaxHopperChoice:
    """A config of JAX's example kernel.

    Attributes:
        tile: Rows and columns of one of its two warpgroups.
        warpgroups: The dimension along which these lie.
        cluster: The dimension along which two blocks form a cluster, or None.
        minor: The dimension that its groups of tiles walk along first.
        width: Tiles of a group.
    """

    tile: tuple[int, int]
    warpgroups: str
    cluster: str | None
    minor: str
    width: int

    @property
    def label(self) -> str:
        """The config in a few characters."""
        rows, cols = self.tile
        return f"{rows}x{cols}/{self.warpgroups}/{self.cluster}/{self.minor}{self.width}"

    def divides(self, case: Case) -> bool:
        """Whether the case's sizes are multiples of its tiles, as it demands."""
        rows, cols = (
            size * (1 + (self.warpgroups == axis)) * (1 + (self.cluster == axis))
            for size, axis in zip(self.tile, "MN", strict=True)
        )
        return not (case.m % rows or case.n % cols or case.k % 64)

    def formula(self) -> Formula:
        """Returns the product with this config."""
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper

        axis = hopper.MatmulDimension
        config = hopper.TuningConfig(
            tile_m=self.tile[0],
            tile_n=self.tile[1],
            tile_k=64,
            max_concurrent_steps=4,
            epi_tile_m=64,
            epi_tile_n=64,
            grid_minor_dim=axis[self.minor],
            grid_tile_width=self.width,
            wg_dimension=axis[self.warpgroups],
            cluster_dimension=axis[self.cluster] if self.cluster else None,
        )
        return lambda operands: (hopper.matmul(operands["a"], operands["b"], None, config),)


def _kernel_formula(case: Case, config: GemmConfig, device: Device) -> Formula:
    kernel = tuning.kernel(case.problem, config, device)
    return lambda operands: (kernel(operands["a"], operands["b"]),)


def _jax_formula(choice: JaxHopperChoice, sms: int | None) -> Formula:
    formula = choice.formula()
    if sms is None:
        return formula

    def with_sms(operands: Operands) -> Results:
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper

        # It asks for the device of the process, and a process that only lowers has none.
        with mock.patch.object(hopper, "get_num_sms", return_value=sms, create=True):
            return formula(operands)

    return with_sms


PEERS: Mapping[str, Callable[[], Peer]] = MappingProxyType(
    {
        "xla": Xla,
        "ours": Op,
        "rows": Promised,
        "jax": JaxHopper,
        "tokamax": Tokamax,
        "cudnn": CudnnGroups,
        "torch": Torch,
        "quack": Quack,
        "triton": Triton,
    }
)
"""The peers by name; `Kernel`, which needs configurations, is made by the programs that use it."""


def _version(package: str) -> tuple[int, int] | None:
    """Returns the first two numbers of an installed package's version, or None."""
    try:
        major, minor, *_ = importlib.metadata.version(package).split(".")
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def built(candidate: Candidate, pool: workers.Workers | None) -> Runner:
    """Compiles a candidate, lowered by other processes if there are any and it can be."""
    if pool is None or candidate.program is None:
        return candidate.build()
    return pool.build(candidate.program)


def compiled(
    compute: Callable[[Operands], Results], case: Case, options: dict[str, Any] | None = None
) -> Runner:
    """Returns a JAX function compiled for the operands of a case, with options of XLA."""
    return jax.jit(compute).lower(operand_shapes(case)).compile(options)


def _tokamax(case: Case, kernel: str) -> Runner:
    ragged_dot = importlib.import_module("tokamax").ragged_dot
    return compiled(plain(case, functools.partial(ragged_dot, implementation=kernel)), case)


def fused(case: Case) -> Callable[[Operands], Results]:
    """Returns a case as a user of `pallas_gemm` writes it, with the epilogue in the call."""
    op: Any = pallas_gemm
    dtype = case.problem.out_dtype
    if case.factors == "gram":
        options = {"preferred_element_type": dtype, "transpose": case.problem.transpose_a}
        return formula(case, lambda x, _: op.gram(x, **options))
    if case.groups:
        transposed = case.problem.transpose_b
        options = {"preferred_element_type": dtype, "transpose_b": transposed}
        return formula(case, functools.partial(op.grouped_gemm, **options))
    where: dict[str, Any] = {
        "transpose_a": case.problem.transpose_a,
        "transpose_b": case.problem.transpose_b,
        "preferred_element_type": dtype,
    }
    if case.scales == "blocks":
        names = tuple(case.scale_shapes)
        return lambda x: (op.gemm(x["a"], x["b"], **{own: x[own] for own in names}, **where),)
    if case.epilogue in ("none", "residual", "bias", "bias_gelu") and case.direction == "forward":
        activation = "gelu" if case.epilogue == "bias_gelu" else None

        def forward(operands: Operands) -> Results:
            extra = {name: operands[name] for name in ("bias", "residual") if name in operands}
            return (op.gemm(operands["a"], operands["b"], activation=activation, **extra, **where),)

        return forward
    if case.epilogue == "swiglu":
        return lambda operands: (
            op.gated_gemm(operands["a"], operands["b"], operands["up"], activation="silu", **where),
        )
    return formula(case, lambda a, b: op.gemm(a, b, **where))
