"""The benchmark: its cases, what is computed and by whom, tables, files, and bad requests."""

import contextlib
import csv
import dataclasses
import functools
import importlib.metadata
import io
import itertools
import pathlib
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from hypothesis import given
from hypothesis import strategies as st

from bench import (
    command,
    contest,
    gemm_bench,
    gpu,
    peers,
    products,
    report,
    session,
    shapes,
    suites,
    tune,
)
from bench.peer import Candidate
from bench.peers import JaxPeer, Xla
from bench.shapes import Case
from pallas_gemm import numerics, target
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.tuning.measure import Settings, Spread, Turn, Variant, measure
from pallas_gemm.tuning.timing import TimingError
from tests import forks

ROOT = pathlib.Path(__file__).parent.parent.parent
QUICK = Settings(
    burst_rounds=2, burst_calls=2, sustained_rounds=2, warm_seconds=0.01, energy_seconds=0.1
)
SMALL = Case(64, 32, 128, source="small")
ENVIRONMENT = {"device": "made up", "driver": "1.2", "operands": "N(0, 1)"}

cases = st.builds(
    Case,
    st.integers(1, 9_999_999),
    st.integers(1, 9_999_999),
    st.integers(1, 9_999_999),
    dtype=st.sampled_from(sorted(shapes.DTYPES)),
    layout=st.sampled_from(shapes.LAYOUTS),
)


class MadeUpGpu:
    """A meter that knows how long each peer takes."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def turn(self, variant: Variant, calls: int) -> Turn:
        # The name of a candidate that is chosen among is its place.
        variant.wait(variant.launch(0))
        each = self._seconds.get(variant.name, 1e-3)
        return Turn((each,) * calls, each * calls, 1.5e9)

    def joules(self, variant: Variant, _: float) -> float | None:
        return 700 * self._seconds.get(variant.name, 1e-3)

    def pause(self, seconds: float) -> None:
        pass


class MadeUpPeer(JaxPeer):
    """A peer whose products are off by something, or that breaks in one way or another."""

    def __init__(
        self,
        name: str,
        off_by: Sequence[float] = (0.0,),
        breaks: Callable[[], None] = lambda: None,
        refuses: str | None = None,
    ) -> None:
        self.name = name
        self._off_by = off_by
        self._breaks = breaks
        self._refuses = refuses

    def refusal(self, case: Case) -> str | None:  # noqa: ARG002 - the same for each
        return self._refuses

    def candidates(self, case: Case) -> list[Candidate]:
        return [
            Candidate(f"off by {x}", functools.partial(self._build, case, x)) for x in self._off_by
        ]

    def _build(self, case: Case, off_by: float) -> peers.Runner:
        self._breaks()
        return made_up_product(case, off_by)


@functools.cache
def made_up_product(case: Case, off_by: float) -> peers.Runner:
    """Compiles a product once, whoever computes it."""
    formula = products.plain(case)
    return peers.compiled(
        lambda operands: tuple(x + jnp.bfloat16(off_by) for x in formula(operands)), case
    )


def fail() -> None:
    raise RuntimeError("no\nluck")


def options(**changes: Any) -> gemm_bench.Options:
    values = flags.FlagValues()
    gemm_bench.define_flags(values)
    values(["gemm_bench"])
    fields = {"cases": (SMALL,), "settings": QUICK} | changes
    return dataclasses.replace(gemm_bench.options_from(values), **fields)


def run(
    *others: JaxPeer, seconds: dict[str, float] | None = None, case: Case = SMALL
) -> tuple[dict[str, report.Row], str]:
    """Runs a session on the CPU with made-up times."""
    bench = session.Bench(
        meter=MadeUpGpu({"xla": 1e-3} | (seconds or {})),
        peers=[Xla(), *others],
        absent={"quack": "quack-kernels is not installed"},
        environment=ENVIRONMENT,
        limits=lambda dtypes: report.Limits(
            {name: {"burst": 1e9, "sustained": 5e8} for name in dtypes}, 4.2e12
        ),
    )
    console = command.Console(file=io.StringIO(), width=command.WIDTH, soft_wrap=True)
    found = session.run(options(cases=(case,)), bench, console)
    assert isinstance(console.file, io.StringIO)
    return {row.peer: row for row in found.rows}, console.file.getvalue()


@given(cases)
def test_the_name_of_a_case_is_read_as_that_case(case: Case) -> None:
    assert shapes.parse(case.name) == case


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_case_of_a_suite_is_legal_and_there_once(name: str) -> None:
    found = suites.suite(name)
    assert found
    assert len({case.name for case in found}) == len(found)
    for case in found:
        assert dataclasses.replace(shapes.parse(case.name), source=case.source) == case
        assert case.source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8192", "shape must be MxNxK.*got '8192'"),
        ("8x8", "shape must be MxNxK"),
        ("8x8x8x8", "shape must be MxNxK"),
        ("8x-8x8", "shape must be MxNxK"),
        ("0x8x8", "m must be at least 1, got 0"),
        ("8x8x8:f64", "'f64' is no option; legal are bf16, f16"),
        ("8x8x8:b0", "'b0' is no option"),
        ("8x8x8:NT:TN", "'TN' sets layout a second time"),
        ("8x8x8:bias:backward", "direction='backward' is measured without an epilogue only"),
        ("8x8x8:b2:bias", "epilogue='bias' is measured without a batch only"),
        ("8x8x8:g2:TN", "groups are measured with a row-major left operand.*got 8x8x8:TN:g2"),
        ("8x8x8:zipf", "routing='zipf' is one of groups, of which there are none"),
        ("8x8x8:gram", "gram is measured in the layouts NT and TN.*got 8x8x8:gram"),
        ("8x9x8:NT:gram", "for a square result.*got 8x9x8:NT:gram"),
        ("8x8x8:NT:gram:bias", "no epilogue or groups, got 8x8x8:NT:gram:bias"),
        ("8x8x8:NT:gram:both", "that is forward"),
    ],
)
def test_text_that_is_no_case_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes.parse(text)


def test_flops_and_bytes_are_those_of_the_definition() -> None:
    case = Case(3, 5, 7)
    assert (case.flops, case.bytes) == (2 * 3 * 5 * 7, 2 * (3 * 7 + 7 * 5 + 3 * 5))
    batched = Case(3, 5, 7, batch=4, dtype="e4m3", layout="NT")
    assert (batched.flops, batched.bytes) == (4 * case.flops, 4 * (21 + 35 + 2 * 15))
    backward = Case(3, 5, 7, direction="backward")
    # Both operands and the cotangent are read, both gradients written.
    assert (backward.flops, backward.bytes) == (2 * case.flops, 2 * (2 * 21 + 2 * 35 + 15))
    swiglu = Case(3, 5, 7, epilogue="swiglu")
    assert (swiglu.flops, swiglu.bytes) == (2 * case.flops, case.bytes + 2 * 35)
    gram = Case(3, 3, 7, layout="NT", factors="gram")
    # As many as XLA's, which computes all of it; but there is one operand.
    assert (gram.flops, gram.bytes) == (2 * 3 * 3 * 7, 2 * (3 * 7 + 3 * 3))


@pytest.mark.parametrize(
    "case",
    [
        Case(8, 16, 32, epilogue=epilogue, layout=layout)
        for epilogue, layout in itertools.product(shapes.EPILOGUES, ("NN", "TT"))
    ],
    ids=lambda case: case.name,
)
def test_the_formulas_agree_with_numpy(case: Case) -> None:
    operands = products.make_operands(case, jax.random.key(1))
    wide = {name: np.asarray(x, np.float64) for name, x in operands.items()}
    a = wide["a"].T if case.problem.transpose_a else wide["a"]
    rights = {name: wide[name] for name in ("b", "up") if name in wide}
    if case.problem.transpose_b:
        rights = {name: x.T for name, x in rights.items()}
    expected = a @ rights["b"] + wide.get("bias", 0) + wide.get("residual", 0)
    if case.epilogue == "bias_gelu":
        expected = np.asarray(jax.nn.gelu(jnp.asarray(expected, jnp.float32)))
    if case.epilogue == "swiglu":
        expected = expected / (1 + np.exp(-expected)) * (a @ rights["up"])
    (exact,) = products.exact(case)(operands)
    np.testing.assert_allclose(exact, expected, rtol=1e-5, atol=1e-4)
    for formula in (products.plain(case), peers.fused(case)):
        (result,) = formula(operands)
        assert result.dtype == case.problem.out_dtype
        np.testing.assert_allclose(result.astype(jnp.float32), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("layout", ["NT", "TN"])
def test_one_array_is_both_operands_of_a_symmetric_product(layout: str) -> None:
    case = Case(1024, 1024, 512, layout=layout, factors="gram", batch=2)
    small = dataclasses.replace(case, m=16, n=16, k=8)
    operands = products.make_operands(small, jax.random.key(1))
    assert list(operands) == ["a"]
    x = np.asarray(operands["a"], np.float64)
    expected = x @ x.swapaxes(1, 2) if layout == "NT" else x.swapaxes(1, 2) @ x
    for formula in (products.exact(small), products.plain(small), peers.fused(small)):
        (result,) = formula(operands)
        np.testing.assert_allclose(result.astype(jnp.float32), expected, rtol=0.02, atol=0.1)
    # Half of it, and the whole, of which dispatch takes what is faster.
    assert {problem.symmetric for problem in tune.products_of(case, H200)} == {"gram", ""}
    assert "bare product" in (peers.Kernel([HopperConfig()], H200).refusal(case) or "")


def test_rows_are_promised_by_a_peer_of_bare_products() -> None:
    case, peer = Case(64, 512, 4096), peers.Promised()
    assert peer.refusal(case) is None
    assert "bare product" in (peer.refusal(dataclasses.replace(case, epilogue="bias")) or "")

    def sums(compute: Any, case: Case) -> Any:
        return numerics.of(compute, products.operand_shapes(case))

    with target("h200"), mock.patch.object(peers, "compiled", sums):
        found: list[Any] = [
            one.build() for own in (peer, peers.Op()) for one in own.candidates(case)
        ]
    assert [own.invariant for (own,) in found] == ["rows", "run"]


def test_blocks_have_scales_of_their_own() -> None:
    case = shapes.parse("72x200x512:e4m3:NT:blocks")
    assert case in {shapes.parse(case.name)}
    operands = products.make_operands(case, jax.random.key(1))
    assert {name: x.shape for name, x in operands.items() if "scale" in name} == {
        "row_scale": (72, 4),
        "col_scale": (4, 2),
    }
    a, b, rows, cols = (np.asarray(x).astype(np.float64) for x in operands.values())
    expected = sum(
        (a[:, block] @ b[:, block].T) * rows[:, [i]] * np.repeat(cols[i], 128)[:200]
        for i, block in enumerate(np.arange(512).reshape(4, 128))
    )
    (exact,) = products.exact(case)(operands)
    np.testing.assert_allclose(exact, expected, rtol=1e-5, atol=1e-3)
    for formula in (products.plain(case), peers.fused(case)):
        (result,) = formula(operands)
        assert result.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(result, np.float64) - expected)
        assert error < 0.01 * np.linalg.norm(expected)
    assert "bare product" in (peers.Kernel([HopperConfig()], H200).refusal(case) or "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("256x384x1024:NT:blocks", "one product of e4m3 in the layout NT"),
        ("256x384x1024:e4m3:blocks", "one product of e4m3 in the layout NT"),
        ("256x384x1000:e4m3:NT:blocks", "k must be a multiple of 512, got 1000"),
    ],
)
def test_blocks_are_measured_of_what_all_peers_take(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shapes.parse(text)


def test_rows_are_dealt_to_groups_as_the_case_says() -> None:
    dealt = {
        routing: Case(100, 8, 8, groups=4, routing=routing).sizes.tolist()
        for routing in shapes.ROUTINGS
    }
    assert dealt == {
        "uniform": [25, 25, 25, 25],
        "zipf": [48, 24, 16, 12],
        "one": [0, 0, 100, 0],
        "empty": [50, 0, 50, 0],
    }


@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_the_formulas_of_groups_agree_with_numpy(layout: str) -> None:
    case = Case(40, 16, 8, groups=4, routing="zipf", layout=layout, direction="both")
    operands = products.make_operands(case, jax.random.key(1))
    a, b, g = (np.asarray(operands[name], np.float64) for name in ("a", "b", "cotangent"))
    group = np.repeat(np.arange(4), case.sizes)
    upright = b.swapaxes(1, 2) if layout == "NT" else b
    out, by_a = (np.einsum(f"mi,m{x}->mj", y, upright[group]) for x, y in (("ij", a), ("ji", g)))
    by_b = np.stack([a[group == i].T @ g[group == i] for i in range(4)])
    expected = out, by_a, by_b.swapaxes(1, 2) if layout == "NT" else by_b
    for formula in (products.exact(case), products.plain(case), peers.fused(case)):
        for result, exact in zip(jax.jit(formula)(operands), expected, strict=True):
            np.testing.assert_allclose(result.astype(jnp.float32), exact, rtol=0.02, atol=0.1)


def test_jaxs_kernels_of_groups_take_what_their_tiles_divide() -> None:
    case, jax_peer = Case(16384, 4096, 4096, groups=8), peers.JaxHopper()
    labels = [candidate.label for candidate in jax_peer.candidates(case)]
    assert labels == ["64x128/4/1", "64x128/4/4", "128x128/4/1", "128x128/4/4"]
    backward = dataclasses.replace(case, direction="backward", n=2880, k=2880)
    assert [candidate.label for candidate in jax_peer.candidates(backward)] == ["64x192/4/1"]
    odd = dataclasses.replace(case, n=4104)
    assert jax_peer.refusal(odd) == "sizes must be multiples of its tiles"
    program: Any = jax_peer.candidates(case)[0].program
    results = jax.eval_shape(program.make(*program.args), *program.operands)
    assert [result.shape for result in results] == [(16384, 4096)]


def test_peers_of_groups_multiply_as_jax_does_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def ragged_dot(*operands: jax.Array, implementation: str, **options: Any) -> jax.Array:
        asked.append(implementation)
        return jax.lax.ragged_dot(*operands, **options)

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(ragged_dot=ragged_dot))
    case = Case(40, 16, 8, groups=4, routing="zipf", layout="NT", direction="both")
    operands = products.make_operands(case, jax.random.key(1))
    expected = jax.jit(products.plain(case))(operands)
    for peer in (peers.Tokamax(), peers.CudnnGroups()):
        assert peer.refusal(case) is None
        assert peer.refusal(Case(40, 16, 8)) == "rows in groups only"
        for candidate in peer.candidates(case):
            for result, other in zip(candidate.build()(operands), expected, strict=True):
                np.testing.assert_array_equal(result, other)
    assert set(asked) == {"mosaic", "triton"}


def test_the_fusion_is_asked_of_xla_where_cudnn_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, case = peers.CudnnGroups(), Case(40, 16, 8, groups=4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        peers.compiled(products.plain(case), case, {f"{peer.option}_": True})
    for version, absent in (("9.21.1", True), ("9.22.0.7", False), ("10.0", False)):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        assert bool(peer.absent()) is absent
    monkeypatch.setattr(importlib.metadata, "version", _not_installed)
    assert peer.absent() == "cuDNN 9.22 or newer is not installed"


def _not_installed(package: str) -> str:
    raise importlib.metadata.PackageNotFoundError(package)


@pytest.mark.parametrize("layout", shapes.LAYOUTS)
def test_gradients_have_the_form_in_which_operands_are_stored(layout: str) -> None:
    case = Case(8, 16, 32, layout=layout, direction="both")
    operands = products.make_operands(case, jax.random.key(2))
    results = products.plain(case)(operands)
    assert [x.shape for x in results[1:]] == [operands["a"].shape, operands["b"].shape]
    exact = products.exact(case)(operands)
    for result, expected in zip(results, exact, strict=True):
        np.testing.assert_allclose(result.astype(jnp.float32), expected, rtol=0.05, atol=0.2)


def test_wrong_results_are_told_by_their_shape_and_their_worst_tile() -> None:
    case = Case(256, 256, 64)
    operands = products.make_operands(case, jax.random.key(0))
    exact, result = products.exact(case)(operands), products.plain(case)(operands)
    errors = (jnp.full((2, 2), 0.5),)
    assert products.worst_error(result, exact, errors) < 1
    spoiled = (result[0].at[200, 10].add(4.0),)
    assert products.worst_error(spoiled, exact, errors) == pytest.approx(8, rel=0.1)
    assert products.worst_error((result[0][:1],), exact, errors) == float("inf")


def test_a_session_times_who_is_right_and_says_why_others_are_not() -> None:
    rows, text = run(
        MadeUpPeer("ours"),
        MadeUpPeer("wrong", off_by=(3.0,)),
        MadeUpPeer("nan", off_by=(float("nan"),)),
        MadeUpPeer("broken", breaks=fail),
        MadeUpPeer("choosy", refuses="multiples of 128 only"),
        seconds={"ours": 0.8e-3},
    )
    assert {name: row.status for name, row in rows.items()} == {
        "xla": "ok",
        "ours": "ok",
        "wrong": "wrong",
        "nan": "wrong",
        "broken": "failed",
        "choosy": "refused",
    }
    timing = rows["ours"].timing("burst")
    assert timing is not None
    assert timing.ratio.median == pytest.approx(1.25)
    assert rows["ours"].flops_per_second("burst") == pytest.approx(SMALL.flops / 0.8e-3)
    assert rows["broken"].note == "RuntimeError: no luck"
    assert "choosy          refused: multiples of 128 only" in text
    assert "quack is absent: quack-kernels is not installed" in text
    assert session.failed(list(rows.values()))
    assert not session.failed([rows["xla"], rows["ours"], rows["broken"], rows["choosy"]])
    assert session.failed([dataclasses.replace(rows["broken"], peer="ours")])


def test_a_case_that_cannot_be_timed_does_not_stop_the_others() -> None:
    class Moody(MadeUpGpu):
        def turn(self, variant: Variant, calls: int) -> Turn:
            if len(saved) == 1:
                raise TimingError("ours: 6 calls launched 7 kernels")
            return super().turn(variant, calls)

    saved: list[list[report.Status]] = []

    def save(found: report.Report) -> None:
        saved.append([row.status for row in found.rows])

    bench = session.Bench(
        Moody({}), [Xla(), MadeUpPeer("ours")], {}, ENVIRONMENT, lambda _: report.Limits({})
    )
    cases = tuple(dataclasses.replace(SMALL, k=k) for k in (64, 128, 192))
    console = command.Console(file=io.StringIO())
    found = session.run(options(cases=cases), bench, console, save)
    done, broken = ["ok", "ok"], ["failed", "failed"]
    # What there is was handed over after each case.
    assert saved == [done, done + broken, done + broken + done]
    assert found.rows[2].note == "TimingError: ours: 6 calls launched 7 kernels"
    assert session.failed(found.rows)


def test_a_peer_is_timed_with_its_fastest_right_candidate() -> None:
    # Names of candidates in the choice are their places: 0, and 1 once the wrong one is out.
    rows, _ = run(MadeUpPeer("ours", off_by=(0.0, 5.0, -0.0)), seconds={"0": 2e-3, "1": 1e-3})
    assert rows["ours"].note == "off by -0.0"
    assert rows["ours"].status == "ok"


def test_operands_rotate_until_the_cache_has_forgotten_them() -> None:
    bytes_of_one = products.operand_bytes(SMALL)
    assert len(contest._operand_sets(SMALL, cold=False)) == 1
    assert len(contest._operand_sets(SMALL, cold=True)) == contest.MOST_SETS
    large = Case(4096, 1024, 4096)
    # Drawn, they would keep the CPU busy for 25 s.
    count = len(jax.eval_shape(lambda: contest._operand_sets(large, cold=True)))
    assert count * products.operand_bytes(large) >= contest.COLD_BYTES
    assert bytes_of_one == 2 * (64 * 128 + 128 * 32)


def wide_row() -> report.Row:
    """A row with the widest figures that can be."""
    spread = Spread(1.2345, 1.1, 1.4)
    timing = report.Timing(Spread(0.0123456, 0.01, 0.015), spread, 1.98e9, 0.5)
    result = report.Result(timing, timing, 12.3456)
    name = "1048576x1048576x1048576:e4m3:TT:b65535"
    return report.Row(name, "s" * 200, "overlong", "ok", "n" * 200, 10**13, 10**12, 1.0, result)


def test_tables_fit_their_width() -> None:
    row = wide_row()
    limits = report.Limits({"e4m3": {"burst": 1.5e15, "sustained": 1.4e15}}, 4.8e12)
    environment = {"device": "NVIDIA H200", "driver": "580.159.04", "operands": "N(0, 1), rotated"}
    refused = dataclasses.replace(row, result=None, status="refused")
    lines = [
        *report.opening(environment, limits).splitlines(),
        *report.header().splitlines(),
        report.case_line(row),
        *report.row_lines(row, limits),
        *report.row_lines(refused, limits),
        *report.row_lines(dataclasses.replace(row, peer="p" * 99), limits),
        *report.summary_lines([row, dataclasses.replace(row, peer="xla")]),
    ]
    assert max(map(len, lines)) <= command.WIDTH == 80


def test_figures_stand_below_their_names() -> None:
    limits = report.Limits({"e4m3": {"burst": 1.5e15, "sustained": 1.4e15}}, 4.8e12)
    names, _ = report.header().splitlines()
    ends = [word.end() for word in re.finditer(r"x XLA|\S+", names)]
    for peer in ("ours", "one tile per CTA, 128x128"):
        *first, burst, sustained, note = report.row_lines(
            dataclasses.replace(wide_row(), peer=peer), limits
        )
        assert first == ([] if peer == "ours" else [peer])
        shared = ["12345.6", "20.3", "810.0", "1.234", "12.2"]
        assert burst.split()[-8:] == [*shared, "54", "1980", "-"]
        assert sustained.split()[-8:] == [*shared, "58", "1980", "12345.6"]
        found = [word.end() for word in re.finditer(r"\S+", sustained)]
        assert found[-8:] == ends[-8:]
        assert note.strip().startswith("nnn")


def made_up_report(ratio: float = 1.25) -> report.Report:
    gpu_ = MadeUpGpu({"xla": 1e-3, "ours": 1e-3 / ratio})
    variants = [Variant(name, lambda i: i, lambda done: done) for name in ("xla", "ours")]
    results = measure(variants, gpu_, QUICK, baseline="xla")
    rows = [
        report.Row(case, "s", peer, "ok", "", 10**9, 10**6, 1.0, results[peer])
        for case in ("64x64x64", "128x64x64:f16")
        for peer in ("xla", "ours")
    ]
    rows.append(report.Row("64x64x64", "s", "jax", "refused", "no", 10**9, 10**6))
    return report.Report({"device": "made up"}, report.Limits({}, None), rows)


def test_csv_has_a_line_for_every_row() -> None:
    lines = list(csv.DictReader(io.StringIO(report.to_csv(made_up_report()))))
    assert len(lines) == 5
    assert float(lines[1]["burst_us"]) == pytest.approx(800)
    assert float(lines[1]["sustained_ratio"]) == pytest.approx(1.25)
    assert float(lines[1]["mj"]) == pytest.approx(560)
    assert (lines[4]["status"], lines[4]["burst_us"]) == ("refused", "")


def test_two_runs_are_compared_by_their_ratios() -> None:
    before = report.ratios_in(report.to_json(made_up_report(1.25)))
    lines = report.compare_lines(made_up_report(1.30), before)
    assert [line.split()[0] for line in lines] == ["burst", "sustained"]
    assert all("by 4.00% in the median, 4.00% at most (ours at" in line for line in lines)
    other = report.ratios_in('{"rows": [{"case": "8x8x8", "peer": "ours", "result": null}]}')
    assert report.compare_lines(made_up_report(), other) == ["the two runs have no ratio in common"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"rows": 3}',
        '{"rows": [{"case": "8x8x8"}]}',
        '{"rows": [{"case": "8x8x8", "peer": "ours", "result": {"burst": {"ratio": 1}}}]}',
        '{"rows": [{"case": "8x8x8", "peer": "ours", "result": 1}]}',
    ],
)
def test_what_is_no_earlier_run_is_noticed_before_the_run(text: str) -> None:
    with pytest.raises(ValueError, match="Error: "):
        report.ratios_in(text)


def test_the_summary_has_the_mean_and_the_worst_of_each_peer() -> None:
    names, burst, sustained = report.summary_lines(made_up_report().rows)
    assert names.split() == ["x", "XLA", "mode", "mean", "worst", "cases", "worst", "at"]
    assert burst.split() == ["ours", "burst", "1.250", "1.250", "2", "64x64x64"]
    assert sustained.split()[:2] == ["ours", "sustained"]


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.csv"
    report.write(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        report.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_plots_are_pictures(tmp_path: pathlib.Path) -> None:
    from bench import plots

    limits = report.Limits({"bf16": {"burst": 1e12, "sustained": 9e11}}, 1e12)
    found = dataclasses.replace(made_up_report(), limits=limits)
    for picture in (plots.ratio_bars(found), plots.roofline(found)):
        assert picture.startswith(b"\x89PNG")


def test_the_power_is_that_between_the_jumps_of_the_energy_counter() -> None:
    # Read every 10 ms, it jumps every 100 ms by 70 J.
    samples = [(i / 100, 70.0 * (i // 10)) for i in range(100)]
    assert gpu.watts_between_steps(samples, since=0.15) == pytest.approx(700)
    assert gpu.watts_between_steps(samples[:15], since=0.0) is None
    assert gpu.watts_between_steps([], since=0.0) is None


def test_a_whole_run_writes_every_file_and_is_compared_with_the_next(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench import machine, workers

    def run(ratio: float, *arguments: str) -> int:
        limits = report.Limits({"bf16": {"burst": 1e12, "sustained": 9e11}}, 1e12)
        bench = session.Bench(
            MadeUpGpu({"xla": 1e-3, "ours": 1e-3 / ratio}),
            [Xla(), MadeUpPeer("ours")],
            {"quack": "quack-kernels is not installed"},
            ENVIRONMENT,
            lambda _: limits,
        )
        monkeypatch.setattr(machine, "open_bench", lambda _: bench)
        values = flags.FlagValues()
        gemm_bench.define_flags(values)
        values(["gemm_bench", "--shape=64x32x128", "--shape=64x32x64", *arguments])
        return gemm_bench._run(values)

    monkeypatch.setattr(gemm_bench.gpu, "missing_gpu", lambda: None)
    monkeypatch.setattr(workers, "Workers", contextlib.nullcontext)
    names = ("rows.csv", "run.json", "plots")
    paths = dict(zip(("csv", "json", "plot"), (tmp_path / name for name in names), strict=True))
    assert run(1.25, *(f"--{flag}={path}" for flag, path in paths.items())) == 0
    first = capsys.readouterr().out
    assert "quack is absent: quack-kernels is not installed" in first
    assert "ours       burst      1.250  1.250     2  64x32x128" in first
    assert max(map(len, first.splitlines())) <= command.WIDTH
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    assert written == ["plots/ratios.png", "plots/roofline.png", "rows.csv", "run.json"]
    assert len(list(csv.DictReader(io.StringIO(paths["csv"].read_text())))) == 4
    assert run(1.25 * 1.01, f"--against={paths['json']}") == 0
    second = " ".join(capsys.readouterr().out.split())
    assert "differ from the earlier run by 1.00% in the median" in second


BAD_REQUESTS = {
    "suite": (["--suite=nope"], "suite must be one of short, squares"),
    "shape": (["--shape=8x8"], "shape must be MxNxK"),
    "dtype": (["--dtypes=f64"], "dtype must be one of bf16"),
    "layout": (["--layouts=XY"], "layout must be one of NN"),
    "peer": (["--peers=cutlass"], "peers: there is no 'cutlass'; legal are xla, ours"),
    "nothing to time": (["--burst_rounds=0", "--sustained_rounds=0"], "nothing to time"),
    "folder": (["--csv=/no/such/folder/out.csv"], "there is no folder /no/such/folder"),
    "a folder as file": (["--json=/"], "it is a folder"),
    "earlier run": (["--against=/no/such/file"], "is not the JSON of a run"),
    "no suite": (["--suite="], "suite is empty"),
    "no time": (["--turn_seconds=nan"], "turn_seconds must be a number of seconds, got nan"),
    "no JSON": (["--config={"], "config: this is no JSON, Expecting property name"),
    "no config": (["--config=[]"], "config: only the Hopper kernel is timed by itself, got []"),
    "no such field": (['--config={"tiles": 1}'], "config: a hopper config has no 'tiles'"),
    "another kernel": (['--config={"kernel": "blackwell"}'], "config: only the Hopper kernel"),
    "no GPU": (["--shape=64x64x64"], "needs an NVIDIA GPU"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_request_that_cannot_be_met_is_one_line_and_status_2(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, message = BAD_REQUESTS[name]
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    values = flags.FlagValues()
    gemm_bench.define_flags(values)
    values(["gemm_bench", *arguments])
    status = command.guarded("gemm_bench", lambda: gemm_bench._run(values))
    shown = capsys.readouterr()
    assert status == command.BAD_REQUEST == 2
    assert shown.out == ""
    assert shown.err.startswith("gemm_bench: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("gemm_bench", ["--burst_rounds=many"], "flag --burst_rounds=many"),
        ("gemm_bench", ["--colour"], "Unknown command line flag 'colour'"),
        ("schedule_study", ["8192"], "unexpected argument '8192'"),
        ("schedule_study", ["--tile=128"], "tile must be like 128x256, got '128'"),
        ("tune", ["--suites=nope"], "suite must be one of short"),
    ],
)
def test_a_program_started_wrongly_says_so_in_one_line(
    program: str, arguments: list[str], message: str
) -> None:
    done = forks.of_session().run_program(ROOT / "bench" / f"{program}.py", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"{program}: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_the_listing_names_every_suite_and_peer() -> None:
    text = gemm_bench.listing()
    assert all(f"\n{name}:\n" in f"\n{text}" for name in suites.SUITES)
    assert all(f"    {name:8} " in text for name in peers.PEERS)


def test_a_stopwatch_tells_the_parts() -> None:
    clock = command.Stopwatch()
    with clock("compiling"):
        pass
    assert clock.summary() == "Done in 0 s (compiling 0 s)."


def test_a_stopwatch_tells_each_part_when_it_ends() -> None:
    lines: list[str] = []
    clock = command.Stopwatch(lines.append)
    with pytest.raises(KeyError), clock("compiling"):
        raise KeyError
    assert lines == ["compiling 0 s"]
    assert clock.summary() == "Done in 0 s."
