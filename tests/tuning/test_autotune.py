"""Tuning: what is tried, what is dropped, what wins, and what `autotune` refuses."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_gemm
from bench import peers, shapes
from pallas_gemm.call import Call
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import B200, H200, Device
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import config_json, heuristics, prediction, tables, targeting
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.planning.by_xla import xla, xla_faster
from pallas_gemm.problem import Blocks, Epilogue, Problem
from pallas_gemm.proving import products
from pallas_gemm.tuning import accuracy, outcome, trials
from pallas_gemm.tuning import autotune as tuning
from pallas_gemm.tuning import space as tuning_space
from pallas_gemm.tuning.measure import Turn, Variant

HOPPER = ARCHITECTURES[0]
# Small: on the CPU it is computed once for each config that is tried.
PROBLEM = Problem(128, 128, 64)
OLDER = dataclasses.replace(H200, kind="NVIDIA A100", compute_capability=(8, 0))
NO_KERNEL = "no kernel runs on NVIDIA A100"
TINY = Problem(16, 128, 64)


class MadeUpGpu:
    """A meter for which the i-th config that is tried takes as long as a function says.

    Attributes:
        sustained: The names of all that ran in sustained turns.
    """

    def __init__(self, seconds: Callable[[str], float], heat: Callable[[str], float]) -> None:
        self.sustained: set[str] = set()
        self._seconds = seconds
        self._heat = heat

    def turn(self, variant: Variant, calls: int) -> Turn:
        variant.wait(variant.launch(0))
        each = self._seconds(variant.name)
        if calls > max(tuning.BURST.burst_calls, tuning.SUSTAINED.burst_calls):
            self.sustained.add(variant.name)
            each *= self._heat(variant.name)
        return Turn((each,) * calls, each * calls)

    def joules(self, *_: object) -> float | None:
        raise AssertionError("tuning asks for no energy")

    def pause(self, seconds: float) -> None:
        pass


@functools.cache
def product(problem: Problem, off_by: float = 0.0) -> Callable[..., jax.Array]:
    """A runner that computes a problem by XLA, wrongly if asked to.

    One for all configs of a problem: what is compiled for a made-up meter is compiled once.
    """
    call = Call(problem.out_dtype, problem.transpose_a, problem.transpose_b, problem.epilogue, None)
    return jax.jit(lambda *operands: _plus(xla.product(call, *operands), off_by))


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Many tests tune the same products: what follows from a product alone is found once."""
    compiled: dict[Any, Any] = {}
    stock = accuracy.compiled_at_once

    def kept(f: Callable[..., Any], *operands: Any) -> Callable[..., Any]:
        own = (f.func, f.args) if isinstance(f, functools.partial) else f
        key = own, *operands
        if key not in compiled:
            compiled[key] = stock(f, *operands)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "compiled_at_once", kept)
        patch.setattr(trials, "exact", functools.cache(trials.exact))
        patch.setattr(trials, "by_xla", functools.cache(trials.by_xla))
        patch.setattr(tuning_space, "configs", functools.cache(tuning_space.configs))
        yield


def _plus(x: jax.Array, number: float) -> jax.Array:
    return x + jnp.asarray(number, x.dtype)


def tuned(
    problem: Problem,
    seconds: Callable[[str], float] = lambda _: 1e-5,
    heat: Callable[[str], float] = lambda _: 1.0,
    build: Callable[[Problem, GemmConfig, Device], tuning.Runner] | None = None,
) -> tuple[outcome.Tuned, MadeUpGpu]:
    gpu = MadeUpGpu(seconds, heat)
    (found,) = tuning.tune(
        [(problem, H200)], tuning.Tools(gpu, build or (lambda p, *_: product(p)))
    )
    assert isinstance(found, outcome.Tuned)
    return found, gpu


def tried(problem: Problem) -> list[GemmConfig]:
    return tuning_space.configs(problem, H200, HOPPER, tuning_space.MOST)


problems = st.builds(
    Problem,
    st.sampled_from([1, 16, 200, 1024, 4096]),
    st.sampled_from([64, 192, 1024, 4104, 8192]),
    st.sampled_from([64, 1000, 4096]),
    transpose_b=st.booleans(),
    batch=st.sampled_from([1, 3]),
    epilogue=st.sampled_from([Epilogue(), Epilogue(bias=True, activation=jax.nn.relu)]),
)


@settings(max_examples=30)
@given(problems, st.integers(1, 20))
def test_what_is_tried_is_legal_different_and_begins_with_the_heuristics_choice(
    problem: Problem, most: int
) -> None:
    configs = tuning_space.configs(problem, H200, HOPPER, most)
    ranked = heuristics.rank(problem, H200, HOPPER)
    assert bool(configs) == bool(ranked)
    if configs:
        assert configs[0] == ranked[0]
        assert len(set(configs)) == len(configs) <= most
        assert all(config.refusals(problem, H200) == () for config in configs)
        # What is tried has to fit into a table.
        assert all(config_json.read(config_json.written(c)) == c for c in configs)


def test_clusters_are_tried_where_there_is_one_tile() -> None:
    configs = tried(Problem(1, 64, 64))
    assert configs
    assert all(config.ctas is None or config.ctas >= config.cluster_size for config in configs)


def test_what_is_tried_differs_in_every_way_that_predictions_are_blind_to() -> None:
    # Of the first, only the last tiles are cut, which allows for few modes.
    for size, is_cut in ((8192, True), (4096, False)):
        configs = [c for c in tried(Problem(size, size, size)) if isinstance(c, HopperConfig)]
        assert (configs[0].split_last is not None) == is_cut
        assert len({config.tile for config in configs}) >= 5
        for field in ("cluster", "persistence", "store_slots", "ctas", "mirrored", "pingpong"):
            assert len({getattr(config, field) for config in configs}) > 1, field
    same_tile = [config for config in configs if config.tile == configs[0].tile]
    assert any(config.schedule != configs[0].schedule for config in same_tile)
    parts = {c.split_k for c in tried(Problem(8192, 8192, 8192)) if c.split_last == 56}
    assert parts >= {2, 4}


def test_blackwells_tiles_are_tried_dealt_out_and_taken_over() -> None:
    (blackwell,) = (known for known in ARCHITECTURES if known.name == "blackwell")
    for k, first in ((256, "static"), (4096, "dynamic")):
        configs = tuning_space.configs(Problem(8192, 8192, k), B200, blackwell)
        assert configs[0].persistence == first
        assert {config.persistence for config in configs} == {"static", "dynamic"}
        (by_die,) = (c for c in configs if str(c.schedule).startswith("by_die:2:"))
        assert (by_die.persistence, (by_die.ctas or 1) // by_die.cluster_size % 2) == ("static", 0)


def test_nothing_hopeless_is_tried() -> None:
    problem = Problem(8192, 8192, 8192)
    predicted = [prediction.seconds(problem, c, H200, HOPPER) for c in tried(problem)]
    assert max(predicted) <= tuning_space.HOPELESS * min(predicted)


def test_the_fastest_config_wins() -> None:
    found, _ = tuned(PROBLEM, lambda name: 0.8e-5 if name == "3" else 1e-5)
    assert found.config == tried(PROBLEM)[3]
    assert found.seconds == pytest.approx(0.8e-5)
    assert found.gain == pytest.approx(1.25)
    assert (found.chosen, found.chosen_seconds) == (tried(PROBLEM)[0], pytest.approx(1e-5))
    assert found.tried == len(tried(PROBLEM))
    assert found.over_xla == pytest.approx(1.25)
    entry = tables.Entry(found.config, found.seconds, found.over_xla)
    assert found.entry == (tables.Key.of(PROBLEM), entry)


def test_the_heuristics_choice_stays_within_the_noise() -> None:
    found, _ = tuned(PROBLEM, lambda name: 0.998e-5 if name == "3" else 1e-5)
    assert found.config == tried(PROBLEM)[0]
    assert found.gain == 1


def test_a_long_product_is_judged_by_sustained_work_too() -> None:
    # Config 1 is the fastest in a burst, but hot; of 2 and 3 the sum of both is better.
    bursts = {"1": 0.90, "2": 0.95, "3": 0.97}
    heat = {"1": 1.3, "2": 1.0, "3": 1.2}
    found, gpu = tuned(
        PROBLEM, lambda name: 1e-3 * bursts.get(name, 1), lambda name: heat.get(name, 1.1)
    )
    assert found.config == tried(PROBLEM)[2]
    assert found.gain == pytest.approx(math.sqrt(1 / 0.95 * 1.1 / 0.95))
    assert gpu.sustained == {"0", "1", "2", "3", tuning.XLA}


def test_a_short_product_is_not_heated() -> None:
    _, gpu = tuned(PROBLEM, lambda _: 1e-5)
    assert gpu.sustained == set()


def test_wrong_results_and_failures_are_dropped_before_anything_is_timed() -> None:
    configs = tried(PROBLEM)

    def build(problem: Problem, config: GemmConfig, _: Device) -> tuning.Runner:
        if config == configs[2]:
            raise RuntimeError("out of\nregisters")
        return product(problem, off_by=1.0 if config == configs[1] else 0.0)

    def seconds(name: str) -> float:
        return 1e-5 if name == tuning.XLA else 1e-5 / (1 + int(name) % 3)

    found, _ = tuned(PROBLEM, seconds, build=build)
    # Of those that are left, the places 5, 8 and so on have the same speed; the first counts.
    assert found.config == configs[5]
    assert found.tried == len(configs) - 2
    wrong, failed = found.dropped
    assert wrong.startswith(outcome.config_label(configs[1]))
    assert "times as much as XLA" in wrong
    assert failed.endswith("RuntimeError: out of registers")
    assert "2 dropped" in str(found)


def test_a_result_with_a_nan_is_wrong() -> None:
    configs = tried(PROBLEM)

    def build(problem: Problem, config: GemmConfig, _: Device) -> tuning.Runner:
        return product(problem, off_by=float("nan") if config == configs[1] else 0.0)

    found, _ = tuned(PROBLEM, build=build)
    assert len(found.dropped) == 1


def test_a_product_for_which_nothing_is_found_does_not_stop_the_others() -> None:
    def seconds(_: str) -> float:
        if len(seen) == 3:
            raise MemoryError("too\nlarge")
        return 1e-5

    def build(problem: Problem, *_: object) -> tuning.Runner:
        return product(problem, off_by=float(problem == PROBLEM))

    refused = dataclasses.replace(PROBLEM, a_dtype=jnp.float32, b_dtype=jnp.float32)
    large, small = dataclasses.replace(PROBLEM, k=320), dataclasses.replace(PROBLEM, k=128)
    wanted = [(PROBLEM, H200), (refused, H200), (PROBLEM, OLDER), (large, H200), (small, H200)]
    seen: list[outcome.Tuned | outcome.Untuned] = []
    for found in tuning.tune(wanted, tuning.Tools(MadeUpGpu(seconds, lambda _: 1.0), build)):
        seen.append(found)
    *without, last = seen
    reasons = [found.reason for found in without if isinstance(found, outcome.Untuned)]
    assert [found.problem for found in seen] == [problem for problem, _ in wanted]
    assert reasons[0].startswith("no config is right: 64x")
    assert reasons[1:] == ["no config is legal", NO_KERNEL, "MemoryError: too large"]
    assert isinstance(last, outcome.Tuned)
    assert str(without[-1]) == "128x128x320 NN bfloat16: MemoryError: too large"


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_next_products_are_compiled_while_one_is_timed(ahead: int) -> None:
    begun: list[int] = []
    order: list[int] = []

    def build(problem: Problem, *_: object) -> tuning.Runner:
        begun.append(problem.k)
        return product(problem)

    def wanted() -> Iterator[tuple[Problem, Device]]:
        for k in (64, 128, 192, 256):
            asked.append(k)
            yield dataclasses.replace(PROBLEM, k=k), H200

    asked: list[int] = []
    tools = tuning.Tools(MadeUpGpu(lambda _: 1e-5, lambda _: 1.0), build, ahead)
    results = tuning.tune(wanted(), tools, most=2)
    for place, found in enumerate(results):
        order.append(found.problem.k)
        assert len(asked) == min(4, place + 1 + ahead)
    assert order == asked
    assert sorted(begun) == sorted(2 * asked)


def test_tuning_can_be_left_at_any_time() -> None:
    tools = tuning.Tools(MadeUpGpu(lambda _: 1e-5, lambda _: 1.0), lambda p, *_: product(p), 2)
    wanted = [(dataclasses.replace(PROBLEM, k=k), H200) for k in (64, 128, 192, 256)]
    results = tuning.tune(wanted, tools, most=2)
    assert isinstance(next(results), outcome.Tuned)
    results.close()
    assert list(results) == []


@pytest.mark.parametrize("problem", [TINY, PROBLEM], ids=["left to XLA", "the kernel's"])
@pytest.mark.parametrize("xla_seconds", [0.9e-5, 1.1e-5])
def test_a_kernel_is_told_to_be_slower_than_xla_whatever_the_heuristics_say(
    problem: Problem, xla_seconds: float
) -> None:
    why = xla_faster.why_xla(problem)
    assert (why is None) == (problem == PROBLEM)
    found, _ = tuned(problem, lambda name: xla_seconds if name == tuning.XLA else 1e-5)
    assert (found.left is None) == (problem == PROBLEM)
    assert found.over_xla == pytest.approx(xla_seconds / 1e-5)
    assert ("x XLA, which computes it" in str(found)) == (xla_seconds < 1e-5)


@pytest.mark.parametrize(
    "problem",
    [
        dataclasses.replace(PROBLEM, epilogue=Epilogue(gated=True, activation=jax.nn.silu)),
        dataclasses.replace(PROBLEM, epilogue=Epilogue(bias=True, residual=True, beta=0.5)),
        dataclasses.replace(PROBLEM, batch=3, transpose_a=True),
        Problem(
            *(128, 128, 128),
            transpose_b=True,
            epilogue=Epilogue(residual=True, beta=0.5),
            symmetric="product",
        ),
        Problem(128, 128, 256, jnp.int8, jnp.int8, jnp.int32, transpose_b=True),
        Problem(128, 128, 256, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, transpose_b=True),
    ],
    ids=outcome.problem_label,
)
def test_every_kind_of_product_can_be_checked(problem: Problem) -> None:
    found, _ = tuned(problem)
    assert found.dropped == ()


@pytest.mark.parametrize(
    ("layout", "epilogue"),
    [
        ("NN", Epilogue(gated=True, activation=jax.nn.relu)),
        ("NT", Epilogue(bias=True, residual=True, alpha=2.0)),
        ("TN", Epilogue()),
    ],
    ids=["NN gated", "NT bias and residual", "TN"],
)
def test_a_product_that_was_made_longer_for_its_kernel_can_be_checked(
    layout: str, epilogue: Epilogue
) -> None:
    # As 125 x 129 x 58 becomes where rows have to be whole cache lines.
    longer = products.transposed(Problem(128, 192, 64, epilogue=epilogue), layout)
    problem = dataclasses.replace(longer, kept=(125, 129))

    def by_a_kernel(*given: jax.Array) -> jax.Array:
        operands = Call(problem.out_dtype, epilogue=epilogue).unpack(given)
        return jnp.asarray(products.exact(problem, operands), problem.out_dtype)

    found, _ = tuned(problem, build=lambda *_: by_a_kernel)
    assert found.dropped == ()


def test_kernels_are_held_against_the_product_of_xla_that_benchmarks_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # XLA adds up products of 8-bit floats more exactly in the first way that comes to its mind
    # than in the one that it finds fastest.
    fp8 = Problem(
        128, 128, 256, jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.bfloat16, transpose_b=True
    )
    seen = compilations(monkeypatch)
    run = product(fp8)
    (candidate,) = peers.Xla().candidates(shapes.parse("128x128x256:e4m3:NT"))
    candidate.build()
    in_benchmarks = [one for one in seen if one.results == {fp8.out_dtype}]
    seen.clear()
    found, _ = tuned(fp8, build=lambda *_: run)
    assert found.dropped == ()
    in_tuning = [one for one in seen if one.results == {fp8.out_dtype}]
    assert in_tuning == in_benchmarks == [Compilation({fp8.a_dtype}, {fp8.out_dtype}, None)]


def test_xla_never_sees_that_the_operands_of_a_reference_had_fewer_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = compilations(monkeypatch)
    a, b = (jax.ShapeDtypeStruct((8, 16), t) for t in (jnp.float8_e4m3fn, jnp.float8_e5m2))
    run = accuracy.compiled_reference(lambda a, b: a @ b.T, a, b)
    narrow, wide = {a.dtype, b.dtype}, {jnp.dtype(jnp.float32)}
    assert [(one.operands, one.results) for one in seen] == [(narrow, wide), (wide, wide)]
    assert jnp.all(run(jnp.full_like(a, 0.5), jnp.ones_like(b)) == 8)


@dataclasses.dataclass(frozen=True)
class Compilation:
    """The types in a program that was compiled, and the options."""

    operands: set[object]
    results: set[object]
    options: object


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Compilation]:
    """Returns a list to which each program adds itself that is lowered and compiled from now on."""
    compile_lowered = jax.stages.Lowered.compile
    seen: list[Compilation] = []

    def noted(
        lowered: jax.stages.Lowered, compiler_options: dict[str, object] | None = None
    ) -> jax.stages.Compiled:
        operands, results = (
            {x.dtype for x in jax.tree.leaves(info)}
            for info in (lowered.in_avals, lowered.out_info)
        )
        seen.append(Compilation(operands, results, compiler_options))
        return compile_lowered(lowered, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    return seen


def test_labels_are_short_and_tell_things_apart() -> None:
    gated = Problem(8, 64, 16, batch=2, transpose_b=True, epilogue=Epilogue(gated=True))
    assert outcome.problem_label(gated) == "2 of 8x64x16 NT bfloat16 gated"
    mixed = Problem(8, 64, 16, jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.bfloat16)
    assert outcome.problem_label(mixed) == "8x64x16 NN float8_e4m3fn bfloat16"
    config = HopperConfig(
        tile=(128, 128), cluster=(2, 1), ctas=128, pingpong=True, late_store=False
    )
    assert outcome.config_label(config) == (
        "128x128 s4 cluster=2x1 ctas=128 pingpong late_store=False"
    )


def test_the_products_of_a_function_are_those_of_its_program() -> None:
    @jax.jit
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(pallas_gemm.gemm(x, w).astype(jnp.float32)))

    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16)
    with pallas_gemm.target("h200"):
        found = tuning.products_of(jax.grad(loss, argnums=(0, 1)), x, w)
    assert all(device == H200 for _, device in found)
    sizes = [(p.m, p.n, p.k, p.layout) for p, _ in found]
    assert sorted(sizes) == [
        (512, 1024, 2048, "NT"),
        (512, 2048, 1024, "NN"),
        (1024, 2048, 512, "TN"),
    ]


@pytest.mark.parametrize("words", [{"epilogue": jnp.tanh}, {"activation": "gelu"}])
def test_what_nobody_draws_operands_for_is_not_tuned(words: Any) -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        # The derivative has a function of the product, which keeps it.
        return jax.vjp(lambda x: pallas_gemm.gemm(x, w, **words), x)[0]

    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16)
    few_bits = jax.ShapeDtypeStruct((1024, 2048), jnp.int8)
    scales = jax.ShapeDtypeStruct((2048,), jnp.float32)
    with pallas_gemm.target("h200"):
        assert not tuning.products_of(f, x, w)
        assert not tuning.products_of(
            lambda x, w, scale: pallas_gemm.gemm(x, w, col_scale=scale), x, few_bits, scales
        )


@pytest.mark.parametrize("kind", ["gram", "product"])
def test_operands_of_a_symmetric_result_make_one(kind: str) -> None:
    problem = Problem(
        *(64, 64, 64),
        transpose_b=True,
        epilogue=Epilogue(alpha=None, residual=True),
        symmetric=kind,  # type: ignore[arg-type]
    )
    a, b, residual, alpha = trials.drawn(problem, jax.random.key(0))
    assert (a == b).all()
    assert (residual == residual.T).all()
    assert (a == a.T).all() == (kind == "product")
    assert alpha.shape == ()
    # What was tuned for all of a result is not taken for half of it.
    keys = {tables.Key.of(dataclasses.replace(problem, symmetric=own)) for own in ("", kind)}
    assert len(keys) == 2


def test_autotune_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    monkeypatch.setattr(targeting, "first_gpu", lambda: None)
    with pytest.raises(RuntimeError, match="a GPU that the kernels run on, got none"):
        pallas_gemm.autotune(pallas_gemm.matmul, a, a)


def test_autotune_does_not_run_while_tracing() -> None:
    def f(a: jax.Array) -> jax.Array:
        pallas_gemm.autotune(pallas_gemm.matmul, a, a)
        return a

    with pytest.raises(RuntimeError, match="cannot be called while a function is traced"):
        jax.jit(f)(jnp.zeros((8, 8)))


def test_autotune_needs_something_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targeting, "first_gpu", lambda: H200)
    with pytest.raises(ValueError, match="found no product in f"):
        pallas_gemm.autotune(lambda x: x + 1, jnp.zeros(8))


def test_autotune_returns_a_table_of_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = MadeUpGpu(lambda name: 0.5e-5 if name == tuning.XLA else 1e-5, lambda _: 1.0)
    tools = tuning.Tools(gpu, lambda problem, *_: product(problem))
    monkeypatch.setattr(targeting, "first_gpu", lambda: H200)
    monkeypatch.setattr(tuning, "gpu_tools", lambda: tools)
    wanted = [(PROBLEM, H200), (TINY, H200), (PROBLEM, B200)]
    monkeypatch.setattr(tuning, "products_of", lambda *_, **__: wanted)
    lines: list[str] = []
    table = pallas_gemm.autotune(lambda x: x, jnp.zeros(1), progress=lines.append)
    assert table.device == H200.kind
    assert set(table.by_key) == {tables.Key.of(PROBLEM), tables.Key.of(TINY)}
    assert [line.split()[0] for line in lines] == ["1/2", "2/2"]
    with table:
        found = tables.find(PROBLEM, H200)
        assert found is not None
        assert found.entry.config == tried(PROBLEM)[0]
        assert found.entry.over_xla == pytest.approx(0.5)


def test_errors_are_compared_tile_by_tile() -> None:
    reference = jnp.zeros((200, 300))
    errors = accuracy.tile_errors(reference.at[130, 299].set(3.0), reference)
    assert errors.tolist() == [[0, 0, 0], [0, 0, 3]]
    batched = accuracy.tile_errors(jnp.ones((2, 5, 5)), jnp.zeros((2, 5, 5)))
    assert batched.shape == (2, 1, 1)


@pytest.mark.parametrize(
    ("wrong", "worst"),
    [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0), (5.0, 2.5), (math.inf, math.inf), (math.nan, math.inf)],
)
def test_an_error_is_given_in_units_of_xlas_in_the_same_tile(wrong: float, worst: float) -> None:
    reference = jnp.zeros((128, 256))
    result = reference.at[5, 200].set(wrong)
    assert accuracy.worst_error(result, reference, jnp.asarray([[9.0, 2.0]])) == worst


@pytest.mark.parametrize("xla_error", [0.0, math.inf])
def test_xlas_own_error_excuses_no_nan(xla_error: float) -> None:
    result = jnp.zeros((4, 4)).at[0, 0].set(math.nan)
    found = accuracy.worst_error(result, jnp.zeros((4, 4)), jnp.full((1, 1), xla_error))
    assert found == math.inf


def test_what_is_wrong_where_xla_is_exact_is_infinitely_wrong() -> None:
    found = accuracy.worst_error(jnp.ones((4, 4)), jnp.zeros((4, 4)), jnp.zeros((1, 1)))
    assert found == math.inf


@pytest.mark.parametrize(("blocks", "is_short"), [(None, False), (Blocks(128), True)])
def test_xla_makes_short_sums_where_the_kernel_does(blocks: Any, is_short: bool) -> None:
    e4m3 = jnp.float8_e4m3fn
    problem = Problem(128, 128, 512, e4m3, e4m3, transpose_b=True, blocks=blocks)
    operands = trials.operand_shapes(problem).present()
    (dot,) = [
        equation
        for equation in jax.make_jaxpr(trials.by_xla(problem))(*operands).eqns
        if equation.primitive.name == "dot_general"
    ]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert (dot.params["precision"] == highest) is is_short
