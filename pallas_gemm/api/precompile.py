"""`precompile`: compiles the kernels of products for a GPU that need not be there.

Each distinct one is planned as it would be there, compiled to that GPU's machine code, and reported
on. It finds a config that no longer fits, or a kernel that the assembler refuses, before you pay
for a GPU. It leaves nothing behind that makes a program start faster there. Kernels are kept as
they were lowered for the GPU that a process has. JAX caches whole programs, under a key that
describes the GPU and its driver.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments, request
from pallas_gemm.api.explaining.explain import explain
from pallas_gemm.api.extras import OF_GATE, OF_ONE
from pallas_gemm.api.gemm import gated_gemm, gemm
from pallas_gemm.api.groups.group_sums import group_sums
from pallas_gemm.api.groups.grouped import grouped_gemm
from pallas_gemm.api.symmetric import gram, symmetric_matmul
from pallas_gemm.call import DIMENSIONS, Operands, SumCall, signature_of
from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels.element_types import is_widened
from pallas_gemm.offline import Report, check_target, compile_reports
from pallas_gemm.op.sum_of_products import sum_of_products
from pallas_gemm.planning import dispatch, numerics
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.planning.targeting import target as planning_for
from pallas_gemm.problem import SCALES, ZEROS, Epilogue, Problem

Shape = tuple[int, int, int] | tuple[int, int, int, int]

_HOW = frozenset(("precision", "schedule", "config", "implementation", "numerics"))
"""The options that a `Problem` says nothing about."""


@dataclasses.dataclass(frozen=True)
class Precompiled:
    """The compiled product for a GPU. `print` it.

    >>> (product,) = precompile([(4096, 4096, 4096)], "h200")  # doctest: +SKIP
    >>> product.report.spill_bytes  # doctest: +SKIP
    0

    Attributes:
        decision: The kernel that computes it, and why, as in `explain`.
        report: The compiler's report on the kernel; None if XLA computes the product.
    """

    decision: Decision
    report: Report | None

    @property
    def implementation(self) -> str:
        """What computes it: "xla", or the name of a kernel."""
        return self.decision.implementation

    @property
    def config(self) -> GemmConfig | None:
        """The kernel's config, which names its schedule too; None for XLA."""
        return None if self.decision.plan is None else self.decision.plan.config

    @property
    def registers(self) -> int:
        """Registers of each thread; 0 for XLA."""
        return 0 if self.report is None else self.report.registers

    @property
    def spill_bytes(self) -> int:
        """Bytes per thread that cross between registers and local memory; 0 for XLA."""
        return 0 if self.report is None else self.report.spill_bytes

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of each block; 0 for XLA."""
        return 0 if self.report is None else self.report.shared_memory_bytes

    def __str__(self) -> str:
        problem = self.decision.problem
        sizes = f"{problem.batch} x {problem.m} x {problem.n} x {problem.k} {problem.layout}"
        if self.report is None:
            return f"{sizes}: xla, because {self.decision.reason}"
        return (
            f"{sizes}: {self.implementation}, {self.config}, {self.registers} registers,"
            f" {self.spill_bytes} bytes spilled, {self.shared_memory_bytes} bytes of shared memory"
        )


def precompile(
    shapes: Iterable[Shape | Problem],
    target: str,
    *,
    dtype: Any = jnp.bfloat16,
    bias: bool = False,
    residual: bool = False,
    gated: bool = False,
    progress: Callable[[Precompiled], object] | None = None,
    **options: Any,
) -> tuple[Precompiled, ...]:
    """Compiles the kernels of products for a GPU that need not be there, and says what they need.

    >>> precompile([(4096, 14336, 4096)], "h200", gated=True, activation="silu")  # doctest: +SKIP

    Or those of a whole program, derivatives included:

    >>> with target("h200"):  # doctest: +SKIP
    ...     products = explain(jax.grad(loss), params, batch).products
    >>> precompile([product.problem for product in products], "h200")  # doctest: +SKIP

    It needs the extra `aot`, and a few seconds for each distinct product; several are compiled at a
    time.

    Args:
        shapes: `(m, n, k)` or `(batch, m, n, k)` of each product, or a `Problem`; for that, only
            `precision`, `schedule`, `config` and `implementation` of the keywords count. A function
            that is its epilogue is left out.
        target: "h100", "h200" or "b200".
        dtype: Type of the operands, such as `jnp.bfloat16` or "bf16", or a pair of them.
        bias: There is a bias.
        residual: There is a residual.
        gated: Each is a `gated_gemm`.
        progress: Called with what became of each distinct product.
        **options: Other arguments of `gemm` or `gated_gemm`, such as `activation` and `config`.
            Arrays, such as scales, may be a `jax.ShapeDtypeStruct`.

    Returns:
        The outcome of each, in the order of `shapes`.

    Raises:
        ValueError: A shape or the target is unknown, or what `options` name cannot compute one.
        TypeError: An option is unknown or of the wrong type.
        RuntimeError: The compiler is not installed, or refuses a kernel.
    """
    check_target(target)
    if not isinstance(shapes, Iterable):
        raise ValueError(f"shapes must be a list of shapes, got {shapes!r}: [(m, n, k)] is one")
    extras = Epilogue(
        bias=arguments.flag("bias", bias),
        residual=arguments.flag("residual", residual),
        gated=arguments.flag("gated", gated),
    )
    products = [_product(i, shape, dtype, extras, options) for i, shape in enumerate(shapes)]
    distinct = list(dict.fromkeys(products))
    with planning_for(target):
        decisions = [product.decision() for product in distinct]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = pool.map(functools.partial(_report, target), distinct, decisions)
        done = {}
        for product, decision, report in zip(distinct, decisions, reports, strict=True):
            done[product] = Precompiled(decision, report)
            if progress is not None:
                progress(done[product])
    return tuple(done[product] for product in products)


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product as a call of a public function.

    Attributes:
        problem: The product; its epilogue does not count.
        extras: The operands beside the two; nothing else of it counts.
        options: Keywords of the function.
    """

    problem: Problem
    extras: Epilogue
    options: dict[str, Any] = dataclasses.field(hash=False)

    def operands(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the operands, by the names that the function has for them."""
        problem, shape = self.problem, jax.ShapeDtypeStruct
        if problem.terms:
            each = [dataclasses.replace(problem, k=k, terms=()) for k in problem.terms]
            pairs = [_Product(one, self.extras, {}).operands() for one in each]
            return {f"{name}{i}": x for i, pair in enumerate(pairs) for name, x in pair.items()}
        right = shape(problem.b_shape, problem.b_dtype)
        left = shape(problem.a_shape, problem.a_dtype)
        found = {"a": left}
        if problem.ragged_k:
            found |= {"b": right, "group_sizes": shape((problem.batch,), jnp.int32)}
        elif problem.groups:
            found |= {"b": right} | ({"up": right} if self.extras.gated else {})
            found["group_sizes"] = shape((problem.groups,), jnp.int32)
        else:
            found |= {"w_gate": right, "w_up": right} if self.extras.gated else {"b": right}
        called = OF_GATE if "w_gate" in found else OF_ONE
        found |= {called.get(name, name): x for name, x in self._of_blocks().items()}
        sizes = {"m": problem.m, "n": problem.n}
        for name in self.extras.operands:
            dtype = problem.added_dtype if name == "residual" else jnp.float32
            own = tuple(sizes[letter] for letter in DIMENSIONS[name])
            whole = problem.out_shape if name == "residual" else own
            found[called.get(name, name)] = shape(whole, dtype)
        return found | {name: x for name, x in self.options.items() if isinstance(x, shape)}

    def _of_blocks(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the scales of blocks, and zero points, if there are any."""
        problem, own = self.problem, self.problem.blocks
        if own is None:
            return {}
        (of_rows, *of_columns), deep = SCALES, problem.k // own.k
        found = {}
        if own.rows:
            found[of_rows] = (*problem.a_shape[:-2], problem.m // own.rows, deep)
        right = (*problem.b_shape[:-2], deep, problem.n // own.columns) if own.columns else None
        for name, zeros in list(zip(of_columns, ZEROS, strict=True))[: problem.sums]:
            found |= {name: right} if right else {}
            found |= {zeros: right} if own.zeros else {}
        return {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in found.items()}

    def __call__(self, operands: dict[str, jax.Array]) -> jax.Array:
        if self.problem.terms:
            # JAX has put the names of the operands into another order.
            return sum_of_products(self._sum(), *(operands[name] for name in self.operands()))
        multiply: Any = gated_gemm if self.extras.gated else gemm
        options = self.options
        if self.problem.groups:
            multiply = grouped_gemm
            none = ("transpose_a", "beta")
            options = {name: x for name, x in options.items() if name not in none}
        if self.problem.ragged_k:
            multiply, kept = group_sums, ("preferred_element_type", "transpose_b", *_HOW)
            options = {name: options[name] for name in kept if name in options}
            operands |= {"a": operands["a"].T} if self.problem.transpose_a else {}
        if self.problem.symmetric:
            multiply = symmetric_matmul
            kept = ("preferred_element_type", "alpha", "beta", *_HOW)
            options = {name: options[name] for name in kept if name in options}
        if self.problem.symmetric == "gram":
            multiply, options["transpose"] = gram, self.problem.transpose_a
            operands = {"x": operands["a"]} | {n: operands[n] for n in operands if n not in "ab"}
        return multiply(**options | operands)

    def _sum(self) -> SumCall:
        """Returns the call for a sum of products, which no public function takes."""
        options, (a, b, *_) = dict(self.options), self.operands().values()
        form = {name: options.pop(name) for name in ("transpose_a", "transpose_b")}
        epilogue = dataclasses.replace(self.problem.epilogue, beta=options.pop("beta"))
        del options["activation"], options["alpha"]
        named = (options.pop(name, None) for name in ("implementation", "config", "schedule"))
        chosen = arguments.options(*named)
        first = request.of_gemm(Operands(a, b), epilogue, chosen, **form, **options)
        return SumCall.of(dataclasses.replace(first.call, **form))

    def decision(self) -> Decision:
        """Returns what computes it on the GPU that is planned for."""
        if self.problem.terms:
            return dispatch.decide(self._sum(), signature_of(self.operands().values()))
        explained = explain(self, self.operands())
        if explained.products:
            return explained.products[0]
        return Decision("xla", self.problem, explained.reason)


def _product(
    place: int, shape: Any, dtype: Any, extras: Epilogue, options: dict[str, Any]
) -> _Product:
    """Returns the product that an element of `shapes` stands for."""
    if isinstance(shape, Problem):
        epilogue = shape.epilogue
        own = {name: value for name, value in options.items() if name in _HOW}
        own["activation"] = epilogue.activation
        numbers = {"alpha": epilogue.alpha, "beta": epilogue.beta}
        own |= {name: number for name, number in numbers.items() if number is not None}
        own |= {"transpose_a": shape.transpose_a, "transpose_b": shape.transpose_b}
        own["preferred_element_type"] = shape.out_dtype
        if (promised := numerics.stating(shape)) is not None:
            own["numerics"] = promised
        return _Product(shape, epilogue, own)
    sizes = shape if isinstance(shape, tuple | list) else ()
    if len(sizes) not in (3, 4) or not all(_is_size(size) for size in sizes):
        raise ValueError(
            f"shapes[{place}]={shape!r} must be (m, n, k) or (batch, m, n, k), of positive"
            " integers, or a Problem"
        )
    dtypes = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    a_dtype, b_dtype = (arguments.number_type("dtype", own) for own in dtypes)
    common = a_dtype if is_widened(a_dtype, b_dtype) else jnp.promote_types(a_dtype, b_dtype)
    out_dtype = options.get("preferred_element_type") or common
    options = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x
        for name, x in options.items()
    }
    layout: dict[str, Any] = {
        name: bool(options.get(name, False)) for name in ("transpose_a", "transpose_b")
    }
    batch, m, n, k = (1, *sizes)[-4:]
    problem = Problem(m, n, k, a_dtype, b_dtype, out_dtype, batch=batch, **layout)
    return _Product(problem, extras, options)


def _is_size(size: Any) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and int(size) > 0


def _report(target: str, product: _Product, decision: Decision) -> Report | None:
    """Compiles the kernel of a product; None where XLA computes it.

    If a product is cut along k, the report is on the kernel that multiplies.
    """
    if decision.plan is None:
        return None
    with planning_for(target):
        reports = compile_reports(product, product.operands(), target=target)
    return max(reports, key=lambda report: report.shared_memory_bytes, default=None)
