"""The study of schedules, and the program that makes tables: what they launch, print and write."""

import csv
import dataclasses
import io
import itertools
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from absl import flags
from rich.console import Console

from bench import (
    claims,
    command,
    counters,
    figures,
    machine,
    schedule_study,
    shapes,
    study,
    tune,
)
from bench.peer import Candidate
from bench.peers import JaxPeer, Xla, compiled
from bench.products import plain
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import tables
from pallas_gemm.planning.by_xla import xla_faster
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import autotune as tuning
from pallas_gemm.tuning import outcome, trials
from pallas_gemm.tuning.measure import Result, Settings, Spread, Timing, Turn, Variant
from pallas_gemm.tuning.timing import TimingError
from schedules.model import Prediction

PROBLEM = Problem(8192, 8192, 8192)
BASE = HopperConfig(tile=(128, 128), late_store=False)
QUICK = Settings(
    burst_rounds=2, burst_calls=2, sustained_rounds=2, warm_seconds=0.01, energy_seconds=0.1
)


def launches(**changes: object) -> list[study.Launch]:
    wanted: dict = {
        "orders": study.orders(["raster", "hilbert", "swizzle"], [8, 24]),
        "persistence": study.PERSISTENCE,
        "clusters": [(1, 1), (2, 1)],
    }
    return study.launches(PROBLEM, H200, BASE, **(wanted | changes))


def options(*arguments: str) -> schedule_study.Options:
    values = flags.FlagValues()
    schedule_study.define_flags(values)
    values(["schedule_study", *arguments])
    return schedule_study.options_from(values)


def row(launch: study.Launch, ratio: float, cost: float = 1.0) -> study.Row:
    """A row with a measured ratio to XLA and a predicted cost, its figures as wide as they get."""
    spread = Spread(ratio, ratio * 0.5, ratio * 1.5)
    timing = Timing(Spread(0.9876, 0.9, 1.0), spread, 1.98e9, 1.0)
    prediction = Prediction(
        l2_sectors=round(cost * 1e9),
        l2_hit_rate=1.0,
        requested_bytes=0,
        merged_bytes=0,
        fabric_bytes=0,
        dram_read_bytes=round(cost * 1e10),
        dram_write_bytes=0,
        compulsory_read_bytes=0,
        concurrency=1,
        waves=1,
        tail=0.0,
        balance=1.0,
    )
    counted = dict.fromkeys(counters.METRICS, 1.0) | {"dram_read_bytes": 1e11, "l2_sectors": 1e9}
    return study.Row(launch, prediction, Result(timing, timing, 12.3456), counted)


class MadeUpGpu:
    """A meter for which online orders take twice as long."""

    def turn(self, variant: Variant, calls: int) -> Turn:
        variant.wait(variant.launch(0))
        each = 2e-3 if "online" in variant.name else 1e-3
        return Turn((each,) * calls, each * calls, 1.5e9)

    def joules(self, *_: object) -> float | None:
        return 0.7

    def pause(self, seconds: float) -> None:
        pass


class MadeUpLaunch(JaxPeer):
    """Computes by XLA what a launch would."""

    def __init__(self, name: str, breaks: bool = False) -> None:
        self.name = name
        self._breaks = breaks

    def candidates(self, case: shapes.Case) -> list[Candidate]:
        def build() -> object:
            if self._breaks:
                raise RuntimeError("no luck")
            return compiled(plain(case), case)

        return [Candidate("", build)]


def test_swizzle_stands_for_one_of_each_group() -> None:
    assert study.orders(["raster", "swizzle"], [8, 12]) == ["raster", "swizzle:8", "swizzle:12"]
    with pytest.raises(ValueError, match="peano"):
        study.orders(["peano"], [8])


def test_every_launch_is_legal_and_there_once() -> None:
    found = launches()
    assert len({launch.name for launch in found}) == len(found)
    assert all(launch.config.refusals(PROBLEM, H200) == () for launch in found)
    places = [launch.place for launch in found]
    assert list(dict.fromkeys(places)) == list(
        itertools.product(study.PERSISTENCE, [(1, 1), (2, 1)])
    )
    # Those of one table stand together.
    assert [place for place, _ in itertools.groupby(places)] == list(dict.fromkeys(places))


def test_arithmetic_orders_are_launched_both_ways_where_a_kernel_can() -> None:
    ways = {(launch.config.persistence, launch.order): set[bool]() for launch in launches()}
    for launch in launches():
        ways[launch.config.persistence, launch.order].add(launch.online)
        named = f"online_{launch.order}" if launch.online else launch.order
        assert launch.config.schedule == named
    for (persistence, order), both in ways.items():
        has_twin = order != "hilbert" and persistence != "dynamic"
        assert both == ({False, True} if has_twin else {False}), (persistence, order)


def test_all_launches_of_a_table_share_everything_but_the_order() -> None:
    for table in study.tables([row(launch, 1.0) for launch in launches()]).values():
        configs = {dataclasses.replace(r.launch.config, schedule="raster") for r in table}
        assert len(configs) == 1


def test_the_ring_is_as_deep_as_shared_memory() -> None:
    config = study.deepest(BASE, PROBLEM, H200)
    deeper = dataclasses.replace(config, stages=config.stages + 1)
    assert config.refusals(PROBLEM, H200) == ()
    assert any("shared memory" in reason for reason in deeper.refusals(PROBLEM, H200))


def test_equal_orders_are_predicted_once_and_alike() -> None:
    small = Problem(1024, 1024, 1024)
    found = study.launches(
        small, H200, BASE, orders=["raster"], persistence=["static"], clusters=[(1, 1)]
    )
    assert [launch.online for launch in found] == [False, True]
    offline, online = study.predictions(found, small, H200, processes=1)
    assert offline is online
    assert offline.requested_bytes == 8 * 8 * 2 * 128 * 1024 * 2


def test_tables_fit_their_width() -> None:
    launch = study.Launch("nested_swizzle:4x2", False, BASE)
    full = row(launch, 1.234)
    bare = study.Row(launch, full.prediction)
    for lines in (study.time_lines([full, bare]), study.traffic_lines([full, bare])):
        assert max(map(len, lines)) <= command.WIDTH
        # The columns stand below their names.
        bars = [[i for i, x in enumerate(line) if x == "|"] for line in lines[1:]]
        assert bars[0] == bars[1] == bars[2] == bars[3]


def test_the_models_choice_is_held_against_the_best() -> None:
    static = [launch for launch in launches() if launch.place == ("static", (1, 1))]
    offline = [launch for launch in static if not launch.online]
    costs = dict(zip(offline, (3.0, 1.0, 2.0, 4.0), strict=True))
    ratios = dict(zip(offline, (0.90, 0.98, 1.00, 0.95), strict=True))
    rows = [row(launch, ratios[launch], costs[launch]) for launch in offline]
    # An online order is no choice of the model, however fast.
    rows += [row(launch, 2.0, 0.1) for launch in static if launch.online]
    names, burst, sustained = study.choice_lines(rows)
    assert burst.split() == ["static", "1x1", "burst", "swizzle:8", "hilbert", "2.04%"]
    assert "sustained" in sustained
    assert max(map(len, (names, burst, sustained))) <= command.WIDTH


def test_csv_has_every_figure_of_every_row() -> None:
    first, second = launches()[:2]
    full = row(first, 0.9)
    bare = study.Row(second, full.prediction)
    lines = list(csv.DictReader(io.StringIO(study.to_csv([full, bare]))))
    assert lines[0]["order"] == "raster"
    assert [line["how"] for line in lines] == ["offline", "online"]
    assert float(lines[0]["burst_ratio"]) == pytest.approx(0.9)
    assert float(lines[0]["mj"]) == pytest.approx(12345.6)
    assert float(lines[0]["model_dram_read_bytes"]) == 1e10
    assert {f"counted_{name}" for name in counters.METRICS} <= set(lines[0])
    assert lines[1]["burst_ms"] == lines[1]["counted_l2_hits"] == ""


def test_launches_are_timed_table_by_table_and_those_that_fail_have_no_result(
    tmp_path: pathlib.Path,
) -> None:
    found = launches(orders=["raster"], clusters=[(1, 1)])
    rows = [dataclasses.replace(row(launch, 1.0), result=None, counters=None) for launch in found]
    peers = [Xla(), *(MadeUpLaunch(x.name, breaks="none" in x.name) for x in found)]
    console = Console(file=io.StringIO(), width=command.WIDTH)
    path = tmp_path / "study.csv"
    chosen = dataclasses.replace(options("--shape=256x256x64"), settings=QUICK, csv=path)
    bench = schedule_study.Bench(peers, MadeUpGpu())
    clock = command.Stopwatch(console.print)
    done = schedule_study.timed_rows(rows, chosen, bench, console, clock)
    ratios = {
        x.launch.name: x.result and x.result.burst and x.result.burst.ratio.median for x in done
    }
    assert ratios == {
        "raster/offline/none/1x1": None,
        "raster/online/none/1x1": None,
        "raster/offline/static/1x1": 1.0,
        "raster/online/static/1x1": 0.5,
        "raster/offline/dynamic/1x1": 1.0,
    }
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "raster/offline/none/1x1: failed: RuntimeError: no luck" in text
    assert "not persistent, cluster 1x1, tile 128x128" in text
    # Where nothing but lines can be seen, they say what is over.
    stages = re.findall(r"^(compiling.*|timing.*) \d+ s$", text, re.MULTILINE)
    assert stages == [
        "compiling and checking",
        *(f"timing {kind} 1x1" for kind in ("none", "static", "dynamic")),
    ]
    assert path.read_text() == study.to_csv(done)


def test_a_table_that_cannot_be_timed_does_not_stop_the_others() -> None:
    class Moody(MadeUpGpu):
        def turn(self, variant: Variant, calls: int) -> Turn:
            if "static" in variant.name:
                raise TimingError("static: 6 calls launched 7 kernels")
            return super().turn(variant, calls)

    found = launches(orders=["raster"], clusters=[(1, 1)])
    rows = [dataclasses.replace(row(launch, 1.0), result=None) for launch in found]
    bench = schedule_study.Bench([Xla(), *(MadeUpLaunch(x.name) for x in found)], Moody())
    console = Console(file=io.StringIO(), width=command.WIDTH)
    chosen = dataclasses.replace(options("--shape=256x256x64"), settings=QUICK)
    done = schedule_study.timed_rows(rows, chosen, bench, console, command.Stopwatch())
    timed = {x.launch.name for x in done if x.result}
    assert timed == {x.launch.name for x in done if x.launch.config.persistence != "static"}
    assert isinstance(console.file, io.StringIO)
    assert "static: failed: TimingError: static: 6 calls" in console.file.getvalue()


COUNTED = dict.fromkeys(counters.METRICS, 0.5)


class MadeUpNcu:
    """Counts what it is asked to, but for the kinds of persistence that break it.

    Attributes:
        programs: The command lines that it ran.
    """

    def __init__(self, breaks: dict[str, Exception]) -> None:
        self.programs: list[Sequence[str]] = []
        self._breaks = breaks

    def collect(
        self, program: Sequence[str], kernels: str, *, expected: int, seconds: float
    ) -> list[dict[str, float]]:
        assert (kernels, seconds) == ("pallas_gemm", 120)
        self.programs.append(program)
        kinds = [part for part in program if part.startswith("--persistence=")]
        if error := self._breaks.get(kinds[-1].removeprefix("--persistence=")):
            raise error
        # Each launch has other counters.
        return [COUNTED | {"cycles": float(i)} for i in range(expected)]


def test_each_kind_of_persistence_is_counted_by_itself(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ncu = MadeUpNcu({"static": counters.CountingError("ended after 120 s; the last words: x")})
    monkeypatch.setattr(counters, "collect", ncu.collect)
    monkeypatch.setattr(sys, "argv", ["study.py", "--counters", "--persistence=none,static"])
    found = launches()
    rows = [dataclasses.replace(row(launch, 1.0), counters=None) for launch in found]
    console = Console(file=io.StringIO(), width=command.WIDTH)
    chosen = dataclasses.replace(options("--counters"), csv=tmp_path / "study.csv")
    clock = command.Stopwatch(console.print)
    done = schedule_study.counted_rows(rows, chosen, console, clock)
    # Each row has its own, in the order in which a replay launches those of its kind.
    for kind in study.PERSISTENCE:
        seen = [x.counters for x in done if x.launch.config.persistence == kind]
        cycles = [counted and counted["cycles"] for counted in seen]
        assert cycles == ([None] * len(seen) if kind == "static" else list(range(len(seen))))
    assert [dataclasses.replace(x, counters=None) for x in done] == rows
    assert [program[-2:] for program in ncu.programs] == [
        [f"--persistence={kind}", "--replay"] for kind in study.PERSISTENCE
    ]
    assert options(*ncu.programs[-1][3:]).persistence == ("dynamic",)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "launches under Nsight Compute, for 120 s at most\ncounting none 0 s\n" in text
    assert "counting static: ended after 120 s; the last words: x\n" in text
    titles = [line.split(", tile")[0] for line in text.splitlines() if "cluster" in line]
    assert titles == [
        *("not persistent, cluster 1x1", "not persistent, cluster 2x1"),
        *("dynamic, cluster 1x1", "dynamic, cluster 2x1"),
    ]
    assert chosen.csv is not None
    assert chosen.csv.read_text() == study.to_csv(done)


def test_a_replay_runs_each_launch_once_and_says_how_far_it_is() -> None:
    found = launches(orders=["raster"], clusters=[(1, 1)])
    ran: list[str] = []

    class Counting(MadeUpLaunch):
        def candidates(self, case: shapes.Case) -> list[Candidate]:
            (one,) = super().candidates(case)

            def build() -> Callable[[object], object]:
                runner = one.build()
                return lambda operands: (ran.append(self.name), runner(operands))[1]

            return [Candidate("", build)]

    said: list[str] = []
    small = options("--shape=256x256x64")
    peers = [Counting(x.name) for x in found]
    assert schedule_study.replay(small, peers, None, said.append) == 0
    assert ran == [x.name for x in found]
    assert said == [
        *("lowering 5 kernels", "lowered and compiled 5 kernels"),
        *(f"launched {count} of 5" for count in range(1, 6)),
    ]


class NoWorkers:
    """Stands for the other processes."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_without_permission_to_count_the_times_are_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def peers(chosen: Sequence[study.Launch], _: object) -> list[JaxPeer]:
        return [Xla(), *(MadeUpLaunch(launch.name) for launch in chosen)]

    refusal = command.RequestError("this user may not read GPU counters")
    monkeypatch.setattr(counters, "collect", MadeUpNcu({"none": refusal}).collect)
    monkeypatch.setattr(counters, "missing", lambda: None)
    monkeypatch.setattr(schedule_study.gpu, "missing_gpu", lambda: None)
    monkeypatch.setattr(schedule_study.gpu, "GpuMeter", MadeUpGpu)
    monkeypatch.setattr(schedule_study.workers, "Workers", NoWorkers)
    monkeypatch.setattr(schedule_study.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(machine, "this_device", lambda: H200)
    monkeypatch.setattr(study, "contestants", peers)
    values = flags.FlagValues()
    schedule_study.define_flags(values)
    path = tmp_path / "study.csv"
    few = ("--shape=512x512x64", "--orders=raster,hilbert", "--clusters=1x1", "--energy_seconds=0")
    brief = ("--burst_rounds=2", "--sustained_rounds=0")
    values(["schedule_study", *few, *brief, "--counters", f"--csv={path}"])
    assert command.guarded("study", lambda: schedule_study._run(values)) == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1] == "study: this user may not read GPU counters"
    lines = list(csv.DictReader(io.StringIO(path.read_text())))
    assert len(lines) == 8
    assert all(float(line["burst_ms"]) in (1, 2) for line in lines)
    # What the model chose is said before anything can go wrong.
    assert "model chooses" in shown.out.partition("counting 3 none launches")[0]
    assert "\npredicting " in f"\n{shown.out}"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--shape=8x8", "shape must be MxNxK"),
        ("--shape=64x64x64:b2", "shape must be that of one bare product"),
        ("--shape=64x64x64:bias", "shape must be that of one bare product"),
        ("--orders=peano", "peano"),
        ("--groups=0", "groups must be positive whole numbers, got '0'"),
        ("--persistence=lazy", "persistence must be among none, static, dynamic, got 'lazy'"),
        ("--clusters=3x1", r"cluster must be one of .* got \(3, 1\)"),
        ("--tile=512x512", r"tile must be from .* got \(512, 512\)"),
        ("--clusters=2", "clusters must be like 128x256, got '2'"),
        ("--tile=128xwide", "tile must be positive whole numbers, got 'wide'"),
        ("--orders=", "orders is empty"),
        ("--groups=", "groups is empty"),
        ("--clusters=", "clusters is empty"),
        ("--persistence=", "persistence is empty"),
        ("--turn_seconds=nan", "turn_seconds must be a number of seconds, got nan"),
        ("--counter_seconds=inf", "counter_seconds must be a number of seconds, got inf"),
    ],
)
def test_a_study_of_what_is_not_there_is_refused(argument: str, message: str) -> None:
    with pytest.raises(command.RequestError, match=message):
        options(argument)


def test_the_picture_of_a_study_says_what_was_run_and_names_each_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bench import plots

    drawn = []
    monkeypatch.setattr(plots, "_png", lambda figure: drawn.append(figure) or b"")
    records = list(csv.DictReader(study.to_csv([row(x, 0.9) for x in launches()]).splitlines()))
    plots.orders(records, "8192 cubed on an H200")
    (figure,) = drawn
    assert figure.get_suptitle().startswith("8192 cubed on an H200, tiles of 128x128")
    tables = {(record["persistence"], record["cluster"]) for record in records}
    assert len(figure.axes) == len(tables)
    offline = sorted(record["order"] for record in records if record["how"] == "offline")
    assert sorted(text.get_text() for axis in figure.axes for text in axis.texts) == offline


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_drawn_from_the_rows_that_are_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import plots

    png = plots._png

    def without_layout(figure: Any) -> bytes:
        # To find room for everything takes longest, and is tried on smaller pictures.
        figure.set_layout_engine("none")
        return png(figure)

    monkeypatch.setattr(plots, "_png", without_layout)
    assert (claims.RESULTS / name).exists()
    assert figures.FIGURES[name]().startswith(b"\x89PNG")


def made_up_tools() -> tuning.Tools:
    def build(problem: Problem, *_: object) -> tuning.Runner:
        return jax.jit(trials.by_xla(problem))

    return tuning.Tools(MadeUpGpu(), build)


def test_the_products_of_a_case_are_those_that_dispatch_looks_up() -> None:
    both = shapes.parse("4096x14336x4096:both")
    assert {(p.m, p.n, p.k, p.layout) for p in tune.products_of(both, H200)} == {
        (4096, 14336, 4096, "NN"),
        (4096, 4096, 14336, "NT"),
        (4096, 14336, 4096, "TN"),
    }
    (gelu,) = tune.products_of(shapes.parse("4096x4096x4096:bias_gelu"), H200)
    assert tables.Key.of(gelu).epilogue == "bias activation"


def finding(problem: Problem, over_xla: float, left: str | None = None) -> outcome.Tuned:
    """What tuning might say of a product."""
    found = HopperConfig(schedule="hilbert"), 9e-4, HopperConfig(), 1e-3, 1.1, over_xla
    return outcome.Tuned(problem, *found, left, 12, ("wrong",))


def test_each_product_enters_the_table_with_what_it_is_beside_xla(tmp_path: pathlib.Path) -> None:
    narrow = shapes.parse("4096x4096x512")
    why = xla_faster.why_xla(narrow.problem)
    assert why
    (problem,) = tune.products_of(narrow, H200)
    other = dataclasses.replace(problem, m=256)
    results = [
        finding(PROBLEM, 0.98),
        outcome.Untuned(dataclasses.replace(PROBLEM, k=64), "no config is legal"),
        finding(problem, 0.9, why),
        finding(other, 1.05, why),
    ]
    output, table = tmp_path / "table.json", tables.Table(H200.kind)
    table, found = tune.kept(results, table, output, tmp_path / "tuned.csv")
    over_xla = {key: entry.over_xla for key, entry in table.entries}
    wanted = {PROBLEM: 0.98, problem: 0.9, other: 1.05}
    assert over_xla == {tables.Key.of(own): ratio for own, ratio in wanted.items()}
    assert tables.Table.load(output) == table
    lines = list(csv.DictReader(io.StringIO((tmp_path / "tuned.csv").read_text())))
    assert [line["over_xla"] for line in lines] == ["0.9800", "0.9000", "1.0500"]
    ours, slower, left = tune.summary_lines(found)
    assert "by 10.0% in geometric mean" in ours
    assert "1 products)" in ours
    assert slower.startswith("1 of them are slower than XLA")
    assert "of 2 products that the heuristics leave to XLA, 1 are faster tuned, 1.050" in left


def test_a_run_that_is_stopped_keeps_what_it_has(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Here:
        """Stands for the other processes."""

        def __enter__(self) -> "Here":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def build_kernel(self, problem: Problem, *_: object) -> tuning.Runner:
            if problem.k == 192:
                raise KeyboardInterrupt
            return made_up_tools().build(problem, HopperConfig(), H200)

    output, rows = tmp_path / "table.json", tmp_path / "tuned.csv"
    suite = tuple(shapes.parse(f"128x128x{k}") for k in (128, 192, 256))
    monkeypatch.setattr(tune.gpu, "missing_gpu", lambda: None)
    monkeypatch.setattr(tune.targeting, "first_gpu", lambda: H200)
    monkeypatch.setattr(tune, "KernelMeter", MadeUpGpu)
    monkeypatch.setattr(tune.workers, "Workers", Here)
    monkeypatch.setattr(tune.random_suite.suites, "suite", lambda _: suite)
    values = flags.FlagValues()
    tune.define_flags(values)
    values(["tune", "--suites=any", f"--output={output}", f"--csv={rows}", "--most=2"])
    assert command.guarded("tune", lambda: tune._run(values)) == 130
    assert capsys.readouterr().err == "tune: stopped; files hold what was found by then\n"
    assert [key.k for key in tables.Table.load(output).by_key] == [128]
    assert len(rows.read_text().splitlines()) == 2
    assert sorted(tmp_path.iterdir()) == [output, rows]
    # Going on leaves out what is there.
    monkeypatch.setattr(tune.random_suite.suites, "suite", lambda _: suite[::2])
    values = flags.FlagValues()
    tune.define_flags(values)
    values(["tune", "--suites=any", "--resume", f"--output={output}", "--most=2"])
    assert tune._run(values) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA H200: 1 products\n1/1 " in shown
    assert f"2 entries in {output}" in shown


def test_products_are_tuned_once_and_not_again() -> None:
    cases = tuple(map(shapes.parse, ("128x128x128", "128x128x128:both", "128x128x64")))
    (known,) = tune.products_of(cases[2], H200)
    before = tables.Table.of(H200.kind, {tables.Key.of(known): tables.Entry(HopperConfig())})
    console = Console(file=io.StringIO(), width=200)
    found = list(tune.tuned_products(cases, before, H200, made_up_tools(), console, 420, 3))
    layouts = sorted((tuned.problem.k, tuned.problem.layout) for tuned in found)
    assert layouts == [(128, "NN"), (128, "NT"), (128, "TN")]
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.startswith("NVIDIA H200: 3 products\n1/3 ")
    (summary,) = tune.summary_lines(found)
    assert "by 0.0% in geometric mean" in summary
    lines = list(csv.DictReader(io.StringIO(tune.to_csv(found))))
    assert lines[0]["product"] == "128x128x128 NN bfloat16"
    assert lines[0]["heuristics"] == lines[0]["tuned"]


def test_no_product_is_begun_after_the_time_is_over() -> None:
    cases = tuple(shapes.parse(f"128x128x{k}") for k in (128, 192, 256))
    console = Console(file=io.StringIO(), width=200)
    nothing = tables.Table(H200.kind)
    found = list(tune.tuned_products(cases, nothing, H200, made_up_tools(), console, -1, 2))
    assert [tuned.problem.k for tuned in found] == [128]
    assert isinstance(console.file, io.StringIO)
    assert "time is over: 2 products are left for --resume" in console.file.getvalue()
    assert tune.summary_lines([]) == ["nothing was tuned"]


def test_going_on_needs_a_table_of_this_gpu(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "table.json"
    assert tune._before(path, H200) == tables.Table(H200.kind)
    path.write_text("{")
    with pytest.raises(command.RequestError, match="it is not JSON"):
        tune._before(path, H200)
    tables.Table("NVIDIA B200").save(path)
    with pytest.raises(command.RequestError, match="is for NVIDIA B200, not for NVIDIA H200"):
        tune._before(path, H200)
