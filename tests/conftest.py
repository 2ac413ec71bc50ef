"""How the tests run: on the CPU unless a GPU is asked for, strict about dtypes, and repeatable."""

import atexit
import contextlib
import functools
import gc
import os
import pathlib
import platform
import subprocess
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from _pytest import unraisableexception
from hypothesis import HealthCheck, settings

CPU_FLAGS = (
    # Eight devices, so that sharded operands can be tested on any computer.
    "--xla_force_host_platform_device_count=8",
    # One thread per matrix product: the GPU simulator waits inside the thread pool that a product
    # of the CPU backend would otherwise want a second thread of, and hangs.
    "--xla_cpu_multi_thread_eigen=false",
    # Programs compile in half the time by the older way to make machine code of fusions, and in
    # one piece; most of what a test takes is compiling.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)
"""Of XLA; what compiles for a GPU in another process inherits them, and reads none."""

# Compute capability that each generation starts with: what `pytest.mark.gpu("hopper")` asks for.
GENERATIONS = {"hopper": "9", "blackwell": "10"}

EARLY = {
    "test_hopper_compiled.py",
    "test_offline.py",
    "test_partition_compiled.py",
    "test_compiled_programs.py",
    "test_suite.py",
    "test_forks.py",
    "test_packaging.py",
}
"""Files with a test, or with a fixture, of more than 10 seconds on an idle core.

Workers take tests from each other until few are left. At the end, a long one would have one worker
wait for the other, for a minute or two.
"""

EARLY_ON_A_GPU = {"test_contract.py"}
"""Likewise where tests run on a GPU: drawn products are compiled one after the other there."""

PLACELESS = {
    *("equinox", "examples", "flax", "kernels", "op", "optax", "planning", "proving"),
    *("rewriting", "tuning"),
    *("few_bits", "test_blocks.py", "test_contract.py", "test_few_bits.py", "test_loss.py"),
    *("test_pairs.py", "test_pieces.py", "test_projections.py", "test_quantize.py"),
}
"""Folders and files of tests. JAX notes no places in the source there, but for tests with `places`.

Kernels have thousands of operations: to note their places takes an eighth of the time of a test.
"""

SUMMARIES = pytest.StashKey[list[str]]()
"""What workers of a parallel run know of kernels."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that write what tests compare with."""
    parser.addoption(
        "--write-summaries",
        action="store_true",
        help="write what the compiler says of the kernels of these tests to tests/summaries.jsonl",
    )
    parser.addoption(
        "--write-plans",
        action="store_true",
        help="write what planning says of products to the files of tests/planning",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settles JAX's and Hypothesis's settings before any test module imports them.

    Each worker of a parallel run comes through here too.
    """
    if not _wants_gpu(config):
        _keep_to_one_core(config)
    # JAX reads its environment when it is imported, so this would otherwise have no effect.
    assert "jax" not in sys.modules, "a plugin imported jax before its settings were made"
    if not _wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
        given = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = " ".join([given, *CPU_FLAGS])
    elif hasattr(config, "workerinput"):
        # The first of several workers on one GPU would take the memory of all.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # NumPy multiplies in the simulator, and reads its environment likewise: see `multiplying.py`.
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ["OPENBLAS_CORETYPE"] = "SandyBridge"
    # An implicit float64 or a silent broadcast is a bug in the op, not a convenience.
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    # A result from an earlier run must not stand in for a compilation that a test is about.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    # What was tuned on this computer says nothing about the code.
    os.environ["PALLAS_GEMM_CACHE_DIR"] = str(pathlib.Path(os.devnull, "no tables"))
    # What no plugin sees any more is looked for at the end, but not by a worker: it takes seconds
    # then, and nobody hears of what a worker finds after its last test.
    is_worker = hasattr(config, "workerinput")
    config.stash[unraisableexception.gc_collect_iterations_key] = 0 if is_worker else 1
    if not _wants_gpu(config) and not _only_controls(config):
        import jax

        # Most programs run once, on a few numbers: to make them fast takes longer than they do. Not
        # by a variable, which those who compile for a GPU in another process would inherit.
        jax.config.update("jax_disable_most_optimizations", True)
        # To leave JAX's frames out of a traceback takes 10 ms, and to ask whether another caller
        # does so 2 ms; tests expect thousands.
        jax.config.update("jax_traceback_filtering", "off")
        from jax._src import traceback_util  # noqa: TID251 - no setting

        traceback_util._is_under_reraiser = lambda _: True  # type: ignore[assignment]
        # Programs beside a simulated kernel, and those of its callbacks, could block each other.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Modules and tests are there to the end: nothing of what collection makes is garbage.
    gc.disable()
    shared = settings(
        # A busy computer is not a bug.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.register_profile("local", shared)
    # The same examples every time: a failure there belongs to the commit and not to chance.
    settings.register_profile("ci", shared, derandomize=True, database=None)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Has a worker that has told all end at once: to free what it made takes it 5 seconds."""
    if hasattr(config, "workerinput"):
        # What is registered last is done first.
        atexit.register(os._exit, 0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Has long tests begin first; skips, with the reason, what this computer has no GPU for."""
    _leave_to_stress(items)
    # The others stay in order: what a module prepares is prepared once.
    early = EARLY_ON_A_GPU if _wants_gpu(config) else EARLY
    items.sort(key=lambda item: item.path.name not in early)
    if not _wants_gpu(config):
        return
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and (reason := _why_not(*marker.args)):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Looks for garbage seldom: to trace programs makes many objects, of which most stay."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes what a worker knows that has ended."""
    lines = getattr(node, "workeroutput", {}).get("summaries", [])
    node.config.stash.setdefault(SUMMARIES, []).extend(lines)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Writes summaries, where asked to and unless a test fails; a worker hands over its own."""
    config = session.config
    if not config.getoption("write_summaries"):
        return
    from tests import summaries

    own = summaries.KEPT.lines()
    if hasattr(config, "workeroutput"):
        config.workeroutput["summaries"] = own
    elif exitstatus == pytest.ExitCode.OK:
        summaries.write(summaries.FILE, own + config.stash.get(SUMMARIES, []))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Has JAX note where operations are in the source, or not, in a test and its fixtures."""
    from jax._src.lib import _jax  # noqa: TID251 - no setting

    names = item.path.relative_to(pathlib.Path(__file__).parent).parts
    is_placeless = not PLACELESS.isdisjoint(names) and not item.get_closest_marker("places")
    _jax.set_tracebacks_enabled(not is_placeless)
    try:
        return (yield)
    finally:
        _jax.set_tracebacks_enabled(True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skips, with the reason, what XLA cannot link for this processor, or not multiply on any."""
    report = yield
    if report.passed or report.skipped:
        return report
    from tests import linking

    return linking.skipped(report)


@pytest.fixture(autouse=True)
def no_packaged_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tests see what the heuristics choose, whatever tuned configs are shipped."""
    tables = sys.modules.get("pallas_gemm.planning.tables")
    if tables is not None:
        monkeypatch.setattr(tables, "_packaged_table", lambda _: None)


@pytest.fixture(scope="session", autouse=True)
def kept_compilations(request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Compiles no lowered module again that an earlier run compiled; gives what compiles each."""
    from pallas_gemm import offline
    from tests import compilations, forks

    compile_elsewhere = offline._compile_elsewhere
    cache = getattr(request.config, "cache", None)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(forks.Forks()) as processes:
        patch.setattr(offline, "subprocess", processes)
        if cache is not None:
            keeping = compilations.kept(compile_elsewhere, cache.mkdir("compilations"))
            patch.setattr(offline, "_compile_elsewhere", keeping)
        compilations.anonymous(patch)
        yield compile_elsewhere


@pytest.fixture(scope="session", autouse=True)
def kept_executables(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Compiles no program for the CPU again that was compiled before; gives what compiles each."""
    from jax._src import compiler  # noqa: TID251 - no setting

    from tests import executables

    compile_and_load = compiler.backend_compile_and_load
    cache = getattr(request.config, "cache", None)
    with pytest.MonkeyPatch.context() as patch:
        if cache is not None and not _wants_gpu(request.config):
            executables.install(patch, cache.mkdir("executables"))
        yield compile_and_load


@pytest.fixture(scope="session", autouse=True)
def quick_simulator() -> Iterator[None]:
    """Simulates kernels in a quarter of the time."""
    from tests.quick import simulator as quick_simulator

    with pytest.MonkeyPatch.context() as patch:
        quick_simulator.install(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_lowering() -> Iterator[pytest.MonkeyPatch]:
    """Lowers kernels in two thirds of the time; gives what can be undone."""
    from tests.quick import lowering as quick_lowering

    with pytest.MonkeyPatch.context() as patch:
        quick_lowering.install(patch)
        yield patch


@pytest.fixture(scope="session", autouse=True)
def quick_arrays(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Has JAX take NumPy's arrays without a program; gives what it does by itself."""
    from jax._src.lax import lax  # noqa: TID251 - no setting

    from tests.quick import arrays as quick_arrays

    stock = lax.stage_p.impl
    with pytest.MonkeyPatch.context() as patch:
        if not _wants_gpu(request.config):
            quick_arrays.install(patch)
        yield stock


@pytest.fixture
def compiled_anew(kept_compilations: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of compiling itself: nothing is taken from an earlier run."""
    from pallas_gemm import offline

    monkeypatch.setattr(offline, "_compile_elsewhere", kept_compilations)


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every kernel be taken unasked, as on a computer that has proven it."""
    from pallas_gemm.planning import proof

    monkeypatch.setattr(proof, "why_untrusted", lambda *_: None)


@pytest.fixture
def as_users_write() -> Iterator[None]:
    """For tests with functions of users, which broadcast and promote as JAX does by default."""
    import jax

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def lowered_empty() -> Callable[..., bytes]:
    """Lowers kernels for tests that have them empty, each once; those of other tests are whole."""
    from pallas_gemm.op import kept_kernels

    return functools.lru_cache(kept_kernels._lowered.__wrapped__)


@pytest.fixture
def empty_kernels(lowered_empty: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what surrounds kernels: to lower what is in one takes most of a second."""
    from pallas_gemm.op import kept_kernels
    from tests import known_kernels

    known_kernels.emptied(monkeypatch)
    monkeypatch.setattr(kept_kernels, "_lowered", lowered_empty)


@pytest.fixture
def new_processes(kept_compilations: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the processes that compile: each imports JAX for itself, as a user's does."""
    from pallas_gemm import offline

    monkeypatch.setattr(offline, "subprocess", subprocess)


@pytest.fixture
def rng() -> Any:
    """Random numbers that are the same in every run."""
    import numpy as np

    return np.random.default_rng(0)


def _keep_to_one_core(config: pytest.Config) -> None:
    """Has all threads of a worker share one core, another one than the next worker's.

    A simulated kernel has many threads, of which one runs at a time. To wake the next one on
    another core takes a third of the time of a simulation.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    # Another run on this computer probably begins with another core.
    first = zlib.crc32(worker["testrunuid"].encode())
    own = cores[(first + int(worker["workerid"].removeprefix("gw"))) % len(cores)]
    os.sched_setaffinity(0, {own})


def _leave_to_stress(items: list[pytest.Item]) -> None:
    """Leaves cases of tests that say so to runs with `-m stress`.

    each_value      the values of all parametrizations take turns: each is in one case
    every_other     half of the cases: of neighbours along a parametrization, one
    """
    functions: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("each_value") or item.get_closest_marker("every_other"):
            functions.setdefault(getattr(item, "function", None), []).append(item)
    for cases in functions.values():
        is_each = cases[0].get_closest_marker("each_value")
        places = _places(cases)
        longest = max(range(len(places[0])), key=lambda axis: max(own[axis] for own in places))
        sizes = [1 + max(own) for own in zip(*places, strict=True)]
        for item, own in zip(cases, places, strict=True):
            turns = (own[longest] % size == place for size, place in zip(sizes, own, strict=True))
            if not (all(turns) if is_each else sum(own) % 2 == 0):
                item.add_marker(pytest.mark.stress)


def _places(cases: list[Any]) -> list[list[int]]:
    """Returns where each case's values are among those of each parametrization."""
    values = list(zip(*map(_values, cases), strict=True))
    orders = [{x: i for i, x in enumerate(dict.fromkeys(own))} for own in values]
    every = zip(*values, strict=True)
    return [[order[x] for order, x in zip(orders, own, strict=True)] for own in every]


def _values(item: Any) -> list[Any]:
    """Returns what a test has of each of its parametrizations, as it is told apart."""
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [x.strip() for x in names.split(",")] if isinstance(names, str) else names
        found.append(tuple(id(item.callspec.params[name]) for name in names))
    return found


def _only_controls(config: pytest.Config) -> bool:
    """Whether other processes run the tests."""
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


def _wants_gpu(config: pytest.Config) -> bool:
    """Whether the expression after -m can select a test that is marked gpu."""
    expression = config.getoption("markexpr")
    return "gpu" in expression and "not gpu" not in expression


def _why_not(generation: str | None = None) -> str | None:
    """Returns why a GPU test cannot run here, or None if it can."""
    import jax

    if jax.default_backend() != "gpu":
        return "no NVIDIA GPU"
    if generation is None:
        return None
    device = jax.devices()[0]
    major = str(device.compute_capability).partition(".")[0]
    if major != GENERATIONS[generation]:
        return f"{device.device_kind} is not a {generation} GPU"
    return None
