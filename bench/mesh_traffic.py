"""Compares products on meshes with XLA's own: what is sent, and what is computed.

    python bench/mesh_traffic.py
        the einsums of docs/parallel.md, and those of models on ten meshes
    python bench/mesh_traffic.py --suite=table
    python bench/mesh_traffic.py --suite=models --mesh="data, fsdp"
    python bench/mesh_traffic.py --gpu
        compiled for eight H200s instead of eight CPUs; neither need be there

Each einsum is compiled for eight devices, forward alone and with gradients, as
ours and as `jnp.einsum`; nothing runs. Bytes are those that collectives bring
to each device, read from the compiled program. FLOPs are XLA's analysis of one
device. It does not see into kernels, so with --gpu there are none. A line ends
with what is worse than XLA's: bytes, or FLOPs by more than 5%. The exit status
is 1 if bytes are.
"""

import dataclasses
import functools
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from absl import flags

from bench import command, model_einsums
from bench.model_einsums import Case
from pallas_gemm import einsum, offline
from pallas_gemm.op.mesh import traffic

PROGRAM = "mesh_traffic"
SUITES = ("table", "models")
TOLERANCE = 1.05
"""Of FLOPs: XLA's analysis counts what is added up and padded, too."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The traffic and the work of one device of eight for a program.

    Attributes:
        received: Bytes that arrive.
        flops: Its arithmetic.
    """

    received: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One einsum on one mesh.

    Attributes:
        case: The einsum.
        gradients: With those of both operands, or without.
        ours: The cost of ours.
        xla: The cost of XLA's own product.
    """

    case: Case
    gradients: bool
    ours: Cost
    xla: Cost

    @property
    def worse(self) -> tuple[str, ...]:
        """The costs that are higher than XLA's."""
        bytes_too = ("bytes",) if self.ours.received > self.xla.received else ()
        return bytes_too + (("flops",) if self.ours.flops > TOLERANCE * self.xla.flops else ())

    def __str__(self) -> str:
        direction = "gradients" if self.gradients else "forward"
        sizes = "x".join(map(str, self.case.mesh.shape.values()))
        text = f"{self.case.subscripts:20} {sizes} {direction:9}"
        for ours, xla in (
            (self.ours.received, self.xla.received),
            (self.ours.flops, self.xla.flops),
        ):
            text += f" {ours / 1e6:9.4g} {xla / 1e6:9.4g}"
        return " ".join((text, *self.worse))


def compare(case: Case, gradients: bool) -> Row:
    """Compiles an einsum twice."""
    ours, xla = (cost(compiled(f, case, gradients)) for f in (einsum, jnp.einsum))
    return Row(case, gradients, ours, xla)


def compiled(multiply: Callable[..., jax.Array], case: Case, gradients: bool) -> Any:
    """Returns an einsum as it runs."""
    product = functools.partial(multiply, case.subscripts)

    def step(*operands: jax.Array) -> Any:
        """Forward, and backward from what follows from the result, as in training."""
        result, pull = jax.vjp(product, *operands)
        return result, pull(result)

    shapes = case.shapes()
    # Gradients are split as what they are the gradients of.
    out = (None, tuple(x.sharding for x in shapes)) if gradients else None
    program = jax.jit(step if gradients else product, out_shardings=out)
    return program.lower(*shapes).compile()


def cost(program: Any) -> Cost:
    """Returns what one device does for a compiled program."""
    found = program.cost_analysis() or {}
    return Cost(traffic.received(program.as_text()), found.get("flops", 0.0))


def cases(suites: Sequence[str], meshes: Sequence[str], devices: Any) -> Iterator[Case]:
    """Yields what is asked for.

    Args:
        suites: Some of `SUITES`.
        meshes: Names of meshes, for the models.
        devices: Eight of them; None for those that JAX finds.
    """
    if "table" in suites:
        yield from model_einsums.table(devices)
    if "models" in suites:
        for name in meshes:
            axes = model_einsums.MESHES[name]
            yield from model_einsums.cases(model_einsums.mesh(axes, devices=devices))


def define_flags(values: flags.FlagValues) -> None:
    """Defines what the command line takes."""
    flags.DEFINE_multi_enum("suite", SUITES, SUITES, "which einsums", flag_values=values)
    names = tuple(model_einsums.MESHES)
    flags.DEFINE_multi_enum("mesh", names, names, "which meshes of the models", flag_values=values)
    flags.DEFINE_bool("gpu", False, "compile for H200s", flag_values=values)


def run(values: flags.FlagValues) -> int:
    """Compares what the flags name, line by line.

    Returns:
        0; 1 if anything sends more than XLA's; 2 for a request that cannot be met.
    """
    if values.gpu and (missing := offline.missing_packages()):
        raise command.RequestError(f"--gpu needs {', '.join(missing)}: the extra aot")
    devices = offline.devices("h200", 8) if values.gpu else None
    say = functools.partial(print, flush=True)
    say(f"{'einsum, mesh':24} {'':9} {'MB: ours':>9} {'XLA':>9} {'MFLOP':>9} {'XLA':>9}")
    rows = []
    for case in cases(values.suite, values.mesh, devices):
        for gradients in (False, True):
            rows.append(compare(case, gradients))
            say(str(rows[-1]))
    worse = {what: sum(what in row.worse for row in rows) for what in ("bytes", "flops")}
    fewer = sum(row.ours.received < row.xla.received for row in rows)
    say(
        f"{len(rows)} programs: more bytes than XLA's in {worse['bytes']}, fewer in {fewer};"
        f" more FLOPs in {worse['flops']}"
    )
    return 1 if worse["bytes"] else 0


if __name__ == "__main__":
    command.start(PROGRAM, run, define_flags)
