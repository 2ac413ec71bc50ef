"""Finds the fastest config of a product by running it: `autotune`.

    table = pallas_gemm.autotune(f, *args)  # runs kernels on the GPU, prints what it finds
    with table:
        f(*args)  # is compiled with what was found
    table.save_for_user()  # or table.save("mine.json"); from then on without a block

For each product of `f`, the configs that `tuning_space` proposes are compiled, checked against a
product in float32, and timed in turns, cold. The fastest in a burst are timed in sustained work as
well, if they run long enough to heat the GPU.

Nothing here ever runs by itself: a program without an entry for a product is compiled with what the
heuristics choose.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.planning import proof, tables, targeting
from pallas_gemm.planning.architectures import architecture_of
from pallas_gemm.planning.by_xla import xla_faster
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import accuracy, trials
from pallas_gemm.tuning import space as tuning_space
from pallas_gemm.tuning.measure import Meter, Result, Settings, Variant, measure
from pallas_gemm.tuning.outcome import Tuned, Untuned, config_label
from pallas_gemm.tuning.progress import Progress
from pallas_gemm.tuning.trials import Runner

Later = concurrent.futures.Future[Callable[..., Any]]
"""A program that is compiled already, or is being compiled."""

BURST = Settings(burst_rounds=3, burst_calls=4, pause=0.01, sustained_rounds=0, energy_seconds=0)
SUSTAINED = Settings(
    burst_rounds=1,
    burst_calls=3,
    pause=0.0,
    sustained_rounds=5,
    # A turn feels how hot its predecessor ran. At 8192 cubed with bias and gelu on an H200, the
    # quartiles of ratios were 1% to 2.5% with turns of 0.06 s, and 0.5% to 0.8% with 0.2 s.
    turn_seconds=0.15,
    warm_seconds=0.3,
    energy_seconds=0,
)
LONG_SECONDS = 1e-4
"""From this length on a product can keep a GPU so busy that power limits it."""

FINALISTS = 3
"""How many of the fastest in a burst are timed in sustained work."""

NOISE = 0.005
"""By how much a config has to be faster than the heuristics' choice to replace it."""

XLA = "xla"


@dataclasses.dataclass(frozen=True)
class Tools:
    """What tuning works with: `gpu_tools` makes the real ones, tests make them up.

    Attributes:
        meter: Times kernels.
        build: Compiles the kernel of a config.
        ahead: How many products are compiled while another one is timed. To lower a kernel is
            Python's work, which launches have to wait for; so none, unless `build` has it done by
            other processes.
    """

    meter: Meter
    build: Callable[[Problem, GemmConfig, Device], Runner]
    ahead: int = 0


def autotune(
    f: Callable[..., Any],
    *args: Any,
    most: int = tuning_space.MOST,
    progress: Callable[[str], object] | None = None,
    **kwargs: Any,
) -> tables.Table:
    """Finds the fastest config of every product in `f(*args, **kwargs)` on this computer's GPU.

    `f` is compiled but not run; its products are, alone and with operands drawn from N(0, 1). It
    takes a few seconds for each.

    >>> table = autotune(train_step, params, batch)  # doctest: +SKIP
    >>> table.save_for_user()  # doctest: +SKIP

    Args:
        f: A function that calls this package, under `jax.jit` or not.
        *args: Its arguments, or `jax.ShapeDtypeStruct` in their place.
        most: How many configs of each product are tried.
        progress: Called with a line for each product; by default they go to the standard error,
            with the time that is left.
        **kwargs: Its keyword arguments.

    Returns:
        The configs: a context manager that puts them into use, which can be merged with `|`,
        saved, and loaded.

    Raises:
        ValueError: `f` contains no product that a kernel could compute.
        RuntimeError: There is no GPU that the kernels run on, or theirs is not proven there, or
            this is called while tracing.
    """
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise RuntimeError("autotune runs kernels, and cannot be called while a function is traced")
    device = targeting.first_gpu()
    architecture = architecture_of(device) if device else None
    if device is None or architecture is None:
        here = device.kind if device else "none"
        raise RuntimeError(f"autotune needs a GPU that the kernels run on, got {here}")
    if why := proof.why_untrusted(architecture, device):
        raise RuntimeError(f"autotune runs the {architecture.name} kernel, {why}")
    wanted = [
        (problem, planned)
        for problem, planned in products_of(f, *args, **kwargs)
        if planned.kind == device.kind
    ]
    if not wanted:
        raise ValueError("autotune found no product in f that a kernel could compute")
    entries = {}
    with contextlib.ExitStack() as stack:
        shown = None if progress else stack.enter_context(Progress(len(wanted), "tuning"))
        for count, found in enumerate(tune(wanted, gpu_tools(), most=most), 1):
            if shown is not None:
                shown.advance(str(found))
            elif progress is not None:
                progress(f"{count}/{len(wanted)} {found}")
            if isinstance(found, Tuned):
                key, entry = found.entry
                entries[key] = entry
    return tables.Table.of(device.kind, entries)


def products_of(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[Problem, Device]]:
    """Returns the products that a function asks tuned configs for, each with its GPU."""
    with tables.recording() as record:
        jax.jit(f).trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
    return list(record.problems.values())


def tune(
    wanted: Iterable[tuple[Problem, Device]], tools: Tools, *, most: int = tuning_space.MOST
) -> Generator[Tuned | Untuned]:
    """Yields what is found for each product, as soon as it is."""
    pool = concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 2))
    try:
        fields = (_begun(problem, device, most, tools, pool) for problem, device in wanted)
        for field in _early(fields, tools.ahead):
            yield field if isinstance(field, Untuned) else _outcome(field, tools.meter)
    finally:
        # Nobody waits for what was begun and is not wanted any more.
        pool.shutdown(wait=False, cancel_futures=True)


def gpu_tools() -> Tools:
    """Returns the tools for this computer's GPU."""
    from pallas_gemm.tuning.timing import KernelMeter

    return Tools(KernelMeter(), build)


def build(problem: Problem, config: GemmConfig, device: Device) -> Runner:
    """Compiles the kernel of a config."""
    operands = trials.operand_shapes(problem).present()
    return jax.jit(kernel(problem, config, device)).lower(*operands).compile()


def kernel(problem: Problem, config: GemmConfig, device: Device) -> Callable[..., jax.Array]:
    """Returns the kernel of a config, a function of the operands.

    Raises:
        ValueError: No kernel runs on the device.
    """
    architecture = architecture_of(device)
    if architecture is None:
        raise ValueError(f"device must be one that a kernel runs on, got {device.kind}")
    return architecture.build(problem, config, device, False)


@dataclasses.dataclass(frozen=True)
class _Field:
    """The contestants of one product, and what they are checked with; some still being compiled.

    Attributes:
        problem: The product.
        configs: The configs to compile; the first is the heuristics' choice.
        runners: The kernel of each.
        left: Why the heuristics would leave the product to XLA; None if they would not.
        exact: Returns the product in float32 (integers in int32), not rounded.
        draw: Returns operands.
        tile_errors: `accuracy.tile_errors` of results of this shape.
        worst_error: `accuracy.worst_error` of results of this shape.
    """

    problem: Problem
    configs: Sequence[GemmConfig]
    runners: Sequence[Later]
    left: str | None
    exact: Later
    draw: Later
    tile_errors: Later
    worst_error: Later


def _early(fields: Iterable[_Field | Untuned], ahead: int) -> Iterator[_Field | Untuned]:
    """Yields each when `ahead` more have been begun, which then go on meanwhile."""
    begun: collections.deque[_Field | Untuned] = collections.deque()
    for field in fields:
        begun.append(field)
        if len(begun) > ahead:
            yield begun.popleft()
    yield from begun


def _begun(
    problem: Problem,
    device: Device,
    most: int,
    tools: Tools,
    pool: concurrent.futures.Executor,
) -> _Field | Untuned:
    """Begins to compile everything that a contest needs, and runs nothing on the GPU."""
    architecture = architecture_of(device)
    if architecture is None:
        return Untuned(problem, f"no kernel runs on {device.kind}")
    configs = tuning_space.configs(problem, device, architecture, most)
    if not configs:
        return Untuned(problem, "no config is legal")
    operands = trials.operand_shapes(problem).present()
    result = jax.ShapeDtypeStruct(problem.out_shape, problem.out_dtype)
    reference = jax.ShapeDtypeStruct(problem.out_shape, trials.exact_dtype(problem))
    errors = jax.eval_shape(accuracy.tile_errors, result, reference)
    key = jax.eval_shape(jax.random.key, 0)

    def later(f: Callable[..., Any], *shapes: Any) -> Later:
        return pool.submit(accuracy.compiled_at_once, f, *shapes)

    return _Field(
        problem,
        configs,
        [pool.submit(tools.build, problem, config, device) for config in configs],
        xla_faster.why_xla(problem),
        pool.submit(accuracy.compiled_reference, trials.exact(problem), *operands),
        later(functools.partial(trials.drawn, problem), key),
        later(accuracy.tile_errors, result, reference),
        later(accuracy.worst_error, result, reference, errors),
    )


def _outcome(field: _Field, meter: Meter) -> Tuned | Untuned:
    try:
        return _contest(field, meter)
    except Exception as error:
        # Such as too little memory: the next product is another matter.
        return Untuned(field.problem, _reason(error))


def _contest(field: _Field, meter: Meter) -> Tuned | Untuned:
    """Times the configs that compute right results."""
    sets = trials.sets(field.problem, field.draw.result())
    # As the benchmarks have it: which way XLA finds fastest decides how 8-bit floats are added up.
    # It finds out by timing kernels on the GPU, which nobody else uses now.
    operands = trials.operand_shapes(field.problem).present()
    by_xla = jax.jit(trials.by_xla(field.problem)).lower(*operands).compile()
    right, dropped = _checked(field, by_xla, sets)
    if not right:
        return Untuned(field.problem, f"no config is right: {'; '.join(dropped)}")
    variants = [_variant(str(place), runner, sets) for place, runner in right.items()]
    variants.append(_variant(XLA, by_xla, sets))
    first = variants[0].name
    bursts = measure(variants, meter, BURST, baseline=first)
    results = bursts
    if _seconds(bursts, first) >= LONG_SECONDS:
        ranked = sorted(variants, key=lambda v: -_score(bursts, v.name))
        others = [v for v in ranked if v.name not in (first, XLA)][:FINALISTS]
        last = [v for v in variants if v.name in (first, XLA) or v in others]
        results = _merged(bursts, measure(last, meter, SUSTAINED, baseline=first))
    scores = {name: _score(results, name) for name in results if name != XLA}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] < scores[first] * (1 + NOISE):
        best = first
    return Tuned(
        field.problem,
        field.configs[int(best)],
        _seconds(bursts, best),
        field.configs[0],
        _seconds(bursts, "0") if "0" in bursts else None,
        scores[best] / scores[first],
        scores[best] / _score(results, XLA),
        field.left,
        len(right),
        tuple(dropped),
    )


def _checked(
    field: _Field, by_xla: Runner, sets: Sequence[tuple[jax.Array, ...]]
) -> tuple[dict[int, Runner], list[str]]:
    """Runs every kernel once: those that are right, by their places, and why others are not."""
    reference = field.exact.result()(*sets[0])
    xla_errors = field.tile_errors.result()(by_xla(*sets[0]), reference)
    worst_error = field.worst_error.result()
    right: dict[int, Runner] = {}
    dropped = []
    for place, compiled in enumerate(field.runners):
        name = config_label(field.configs[place])
        try:
            runner = compiled.result()
            worst = float(worst_error(runner(*sets[0]), reference, xla_errors))
        except Exception as error:
            dropped.append(f"{name}: {_reason(error)}")
            continue
        if worst <= accuracy.ALLOWED:
            right[place] = runner
        else:
            dropped.append(f"{name} errs {worst:.3g} times as much as XLA")
    return right, dropped


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _variant(name: str, runner: Runner, sets: Sequence[tuple[jax.Array, ...]]) -> Variant:
    return Variant(name, lambda i: runner(*sets[i % len(sets)]), jax.block_until_ready)


def _merged(bursts: Mapping[str, Result], sustained: Mapping[str, Result]) -> dict[str, Result]:
    """Returns the finalists with the bursts of the first round, which were more."""
    return {
        name: dataclasses.replace(result, burst=bursts[name].burst)
        for name, result in sustained.items()
    }


def _score(results: Mapping[str, Result], name: str) -> float:
    """Returns how much faster than the first one is, burst and sustained alike."""
    timings = (results[name].burst, results[name].sustained)
    ratios = [timing.ratio.median for timing in timings if timing is not None]
    return math.prod(ratios) ** (1 / len(ratios))


def _seconds(results: Mapping[str, Result], name: str) -> float:
    timing = results[name].burst
    return timing.seconds.median if timing else math.nan
