"""Compiles programs for eight H200s that need not be there, and prints what each does as JSON.

`tests/op/mesh/test_partition_compiled.py` runs this in a process of its own, because the compiler
keeps the architecture that it saw first. Most kernels are empty: plain ones, which other tests
compile, and one that is like another here. What is told of them is what surrounds them.
"""

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import explain_on_mesh, gemm, offline, quantize, ragged_dot
from pallas_gemm.api.collective import all_gather_gemm, gemm_reduce_scatter
from tests import known_kernels

WHOLE = {"narrow", "integers", "exchanging"}
"""Programs whose kernels are not empty: among them is each that sends rows to other devices."""
ASSEMBLED = "MOSAIC_GPU_DUMP_PTXAS"
"""The variable by which the assembler tells of each kernel."""

_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%\S+ = (.*?) ([a-z-]+)\(", re.MULTILINE)
_COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def _mesh(kind: AxisType) -> Mesh:
    return Mesh(offline.devices("h200", 8).reshape(2, 4), ("x", "y"), axis_types=(kind, kind))


def _step(f: Callable[..., Any]) -> Callable[..., Any]:
    """Forward, and backward from what follows from the result, as in training."""

    def both(*operands: jax.Array) -> Any:
        result, pull = jax.vjp(f, *operands)
        return result, pull(result)

    return both


def _layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return gemm(gemm(x, w, activation="gelu"), v)


def _exchanging(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return gemm_reduce_scatter(all_gather_gemm(x, w, "y", activation="gelu"), v, "y")


def _of_function(a: jax.Array, b: jax.Array, bias: jax.Array) -> Any:
    def f(s: jax.Array, bias: jax.Array) -> Any:
        z = jax.nn.gelu(s + bias[None])
        return z.astype(jnp.bfloat16), jnp.sum(z * z, -1), jnp.max(z, 0)

    return gemm(a, b, epilogue=f, operands=(bias,))


def _integer_sums(a: jax.Array, b: jax.Array) -> jax.Array:
    return gemm_reduce_scatter(a, b, "y", transpose_b=True, preferred_element_type=jnp.int32)


def _programs(mesh: Mesh, explicit: Mesh) -> dict[str, Program]:
    def shape(
        rows: int, columns: int, *spec: Any, on: Mesh = mesh, dtype: Any = jnp.bfloat16
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), dtype, sharding=NamedSharding(on, P(*spec)))

    rows, columns = shape(4096, 4096, "x", None), shape(4096, 4096, None, "y")
    contracted = shape(4096, 4096, "x", "y"), shape(4096, 4096, "y", None)
    weights = shape(1024, 4096, None, "y"), shape(4096, 1024, "y", None)
    mapped = functools.partial(jax.shard_map, mesh=mesh)
    specs = (P("y"), P(None, "y"), P("y"))
    sequence = shape(2048, 1024, "y", None)
    bias = jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=NamedSharding(mesh, P("y")))
    return {
        "columns": (gemm, (rows, columns)),
        "given": (
            jax.jit(gemm, in_shardings=tuple(x.sharding for x in (rows, columns))),
            (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 2,
        ),
        "contracted": (gemm, contracted),
        "scattered": (
            jax.jit(gemm, out_shardings=NamedSharding(mesh, P("y", None))),
            (shape(4096, 4096, None, "y"), contracted[1]),
        ),
        "narrow": (
            jax.jit(gemm, out_shardings=NamedSharding(mesh, P("y", None))),
            (shape(2048, 4096, None, "y"), shape(4096, 2560, "y", None)),
        ),
        "integers": (
            mapped(_integer_sums, in_specs=(P(None, "y"), P(None, "y")), out_specs=P("y")),
            (
                shape(4096, 4096, None, "y", dtype=jnp.int8),
                shape(4096, 4096, None, "y", dtype=jnp.int8),
            ),
        ),
        "explicit": (
            gemm,
            (
                shape(4096, 4096, "x", None, on=explicit),
                shape(4096, 4096, None, "y", on=explicit),
            ),
        ),
        "function": (_of_function, (rows, columns, bias)),
        "function of rows": (
            lambda *x: _of_function(*x)[:2],
            (rows, shape(4096, 4096), jax.ShapeDtypeStruct((4096,), jnp.float32)),
        ),
        "explicit function": (
            _of_function,
            (
                shape(4096, 4096, "x", None, on=explicit),
                shape(4096, 4096, None, "y", on=explicit),
                jax.ShapeDtypeStruct(
                    (4096,), jnp.float32, sharding=NamedSharding(explicit, P("y"))
                ),
            ),
        ),
        "groups": (
            ragged_dot,
            (
                rows,
                jax.ShapeDtypeStruct(
                    (8, 4096, 4096),
                    jnp.bfloat16,
                    sharding=NamedSharding(mesh, P(None, None, "y")),
                ),
                jax.ShapeDtypeStruct((8,), jnp.int32),
            ),
        ),
        "quantized": (functools.partial(quantize, axis="both"), (shape(2048, 4096, "x", "y"),)),
        "mapped": (
            mapped(gemm, in_specs=(P("x"), P(None, "y")), out_specs=P("x", "y")),
            (rows, columns),
        ),
        "layers": (_step(_layers), (shape(4096, 1024, "x"), *weights)),
        "exchanging": (
            _step(mapped(_exchanging, in_specs=specs, out_specs=P("y"))),
            (sequence, *weights),
        ),
    }


def _done(text: str) -> list[tuple[str, str]]:
    """Returns the kernels and the messages of a compiled program, in order, with their results."""
    found = []
    entry = text[text.index("\nENTRY") :]
    for line in entry.splitlines():
        if match := _INSTRUCTION.match(line):
            result, name = match.groups()
            if 'custom_call_target="mosaic_gpu_v2"' in line:
                found.append(("kernel", result.partition("{")[0]))
            elif re.match(_COLLECTIVES, name):
                found.append((name, result.partition("{")[0]))
    return found


def main() -> None:
    """Prints what every program does."""
    programs = _programs(_mesh(AxisType.Auto), _mesh(AxisType.Explicit))
    done: dict[str, Any] = {}

    def compile_some(names: Iterable[str]) -> None:
        for name in names:
            f, operands = programs[name]
            done[name] = _done(jax.jit(f).lower(*operands).compile().as_text())

    compile_some(WHOLE)
    # What was lowered whole is forgotten, and the assembler tells of no empty kernel.
    jax.clear_caches()
    os.environ.pop(ASSEMBLED, None)
    with pytest.MonkeyPatch.context() as patch:
        known_kernels.emptied(patch)
        compile_some(programs.keys() - WHOLE)
        f, operands = programs["columns"]
        done["explained"] = str(explain_on_mesh(f, *operands))
        f, operands = programs["exchanging"]
        done["sends"] = str(explain_on_mesh(f, *operands))
        ragged = jax.ShapeDtypeStruct((2112, 1024), jnp.bfloat16, sharding=operands[0].sharding)
        done["refused"] = str(explain_on_mesh(f, ragged, *operands[1:]))
        f, operands = programs["narrow"]
        done["narrow explained"] = str(explain_on_mesh(f, *operands))
    json.dump(done, sys.stdout)


if __name__ == "__main__":
    main()
