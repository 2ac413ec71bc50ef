"""The model where exact answers are known: limits, identities, bad input, and how long it takes."""

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedules
from schedules import machines, model, model_pace, model_problem
from schedules.model import H100, H200, Machine, Prediction, predict
from tests import clock

TILE = (64, 32, 16)
PROBLEM_K = 256
A_STRIPE, B_STRIPE, OUTPUT = 64 * 256 * 2, 32 * 256 * 2, 64 * 32 * 2
"""Bytes that a tile of `TILE` reads of A and of B, and writes."""


def machine(l2_bytes: int, *, sms: int = 8, partitions: int = 1, gpcs: int = 4) -> Machine:
    return Machine("test", sms, l2_bytes, partitions, gpcs, 1e12, 1e9)


def predicted(order: str, rows: int, cols: int, on: Machine, **options: Any) -> Prediction:
    schedule = schedules.build(order, rows, cols)
    return predict(schedule, machine=on, **({"tile": TILE, "k": PROBLEM_K} | options))


# Limits.


@pytest.mark.parametrize("order", ["raster", "hilbert", "swizzle:3"])
@pytest.mark.parametrize("persistence", ["none", "static", "dynamic"])
@pytest.mark.parametrize("partitions", [1, 2])
def test_when_everything_fits_only_compulsory_bytes_are_read(
    order: str, persistence: str, partitions: int
) -> None:
    on = machine(2**30, partitions=partitions)
    result = predicted(order, 7, 9, on, persistence=persistence)
    assert result.dram_read_bytes == 7 * A_STRIPE + 9 * B_STRIPE == result.compulsory_read_bytes


@pytest.mark.parametrize("options", [{"cluster": (2, 1)}, {"cluster": (2, 2), "multicast": False}])
def test_compulsory_bytes_cover_clusters_and_batches(options: dict[str, Any]) -> None:
    result = predicted("hilbert", 4, 5, machine(2**30), batch=3, **options)
    rows, cols = options["cluster"]
    assert result.dram_read_bytes == 3 * (4 * rows * A_STRIPE + 5 * cols * B_STRIPE)
    assert result.dram_write_bytes == 3 * 20 * rows * cols * OUTPUT


def test_without_a_cache_one_worker_reads_every_stripe_from_memory() -> None:
    result = predicted("raster", 5, 6, machine(0), workers=1)
    assert result.dram_read_bytes == 30 * (A_STRIPE + B_STRIPE) == result.requested_bytes
    assert result.merged_bytes == 0
    written = 30 * OUTPUT
    assert result.l2_hit_rate == pytest.approx(written / (written + result.requested_bytes))


@pytest.mark.parametrize(
    ("capacity", "rows_read"),
    [
        # What comes between two reads of the same block of A: a stripe of each operand, an output.
        (A_STRIPE + B_STRIPE + OUTPUT, 5),
        (A_STRIPE + B_STRIPE + OUTPUT - 1, 30),
    ],
)
def test_one_worker_keeps_a_row_exactly_when_a_step_of_the_row_fits(
    capacity: int, rows_read: int
) -> None:
    result = predicted("raster", 5, 6, machine(capacity), workers=1)
    assert result.dram_read_bytes == rows_read * A_STRIPE + 30 * B_STRIPE


def test_workers_in_step_share_what_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedules.model_pace.STEP_SPREAD", 0.0)
    # One wave, one GPC: all reads of a block come at the same time, so one of them is made.
    result = predicted("raster", 2, 4, machine(0, gpcs=1))
    assert result.dram_read_bytes == 2 * A_STRIPE + 4 * B_STRIPE
    assert result.merged_bytes == 8 * (A_STRIPE + B_STRIPE) - result.dram_read_bytes


def test_a_block_that_both_partitions_read_crosses_the_fabric_once() -> None:
    # Fifteen columns move on by one worker per row: all read each stripe, one side does not own it.
    result = predicted("raster", 16, 15, machine(2**30, partitions=2))
    assert result.fabric_bytes == result.dram_read_bytes == result.compulsory_read_bytes
    assert predicted("raster", 16, 15, machine(2**30)).fabric_bytes == 0


def test_a_multicast_is_counted_once_and_nothing_else_is_left_out() -> None:
    on = machine(2**20)
    cast = predicted("raster", 4, 4, on, cluster=(2, 1))
    plain = predicted("raster", 4, 4, on, cluster=(2, 1), multicast=False)
    assert cast.requested_bytes == 16 * (2 * A_STRIPE + B_STRIPE)
    assert plain.requested_bytes == 16 * 2 * (A_STRIPE + B_STRIPE)
    assert cast.dram_write_bytes == plain.dram_write_bytes


def test_without_multicast_a_cluster_is_its_tiles_one_by_one() -> None:
    grid_of_tiles = model_problem._ctas_of(schedules.raster(2, 2).order, 2, 1)
    assert grid_of_tiles.tolist() == [
        [0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0], [2, 1], [3, 1],
    ]  # fmt: skip


# Waves.


def test_waves_tail_and_balance_of_64_by_64_tiles() -> None:
    result = predicted("hilbert", 64, 64, H100, tile=(128, 128, 64), k=64)
    assert result.concurrency == 132
    assert result.waves == 32
    # 31 full waves leave 4 tiles.
    assert result.tail == pytest.approx(128 / 132)
    assert result.balance == pytest.approx(4096 / (32 * 132))


def test_full_waves_have_no_tail() -> None:
    result = predicted("raster", 8, 8, machine(2**20))
    assert (result.waves, result.tail, result.balance) == (8, 0, 1)


def test_fewer_tiles_than_workers_leave_workers_idle() -> None:
    result = predicted("raster", 1, 2, machine(2**20))
    assert (result.waves, result.tail, result.balance) == (1, 0.75, 0.25)


def test_no_more_clusters_than_are_resident() -> None:
    assert predicted("raster", 8, 8, H200, cluster=(2, 2)).concurrency == 30
    assert predicted("raster", 8, 8, H200, cluster=(2, 1), workers=64).concurrency == 64


def test_an_order_handed_out_by_hardware_is_dynamic() -> None:
    options = {"tile": (128, 128, 64), "k": 512}
    runs = [
        predicted("hilbert", 20, 20, H100, persistence=persistence, **options)
        for persistence in ("none", "dynamic", "static")
    ]
    assert runs[0] == runs[1]
    assert runs[1] != runs[2]


# Properties.

launches = st.fixed_dictionaries(
    {
        "order": st.sampled_from(["raster", "raster:cols", "hilbert", "swizzle:3:cols"]),
        "rows": st.integers(1, 12),
        "cols": st.integers(1, 12),
        "on": st.builds(
            machine,
            st.integers(0, 2**20),
            sms=st.integers(4, 12),
            partitions=st.sampled_from([1, 2]),
        ),
        "k": st.integers(1, 300),
        "cluster": st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
        "multicast": st.booleans(),
        "persistence": st.sampled_from(["none", "static", "dynamic"]),
        "batch": st.integers(1, 2),
    }
)


@given(launches)
@settings(max_examples=40)
def test_bytes_add_up(launch: dict[str, Any]) -> None:
    result = predicted(**launch)
    looked_up = result.requested_bytes - result.merged_bytes
    assert 0 <= result.merged_bytes < result.requested_bytes
    assert 0 <= result.fabric_bytes <= looked_up
    # Each byte count is rounded by itself, from a mean of several runs.
    assert result.compulsory_read_bytes - 1 <= result.dram_read_bytes <= looked_up + 1
    sectors = (looked_up + result.fabric_bytes + result.dram_write_bytes) / 32
    assert result.l2_sectors == pytest.approx(sectors, abs=1)
    misses = (result.fabric_bytes + result.dram_read_bytes) / 32
    assert result.l2_hit_rate == pytest.approx(1 - misses / sectors, abs=1 / sectors)
    assert 0 <= result.l2_hit_rate <= 1
    assert 0 <= result.tail < 1
    assert 0 < result.balance <= 1


@given(launches)
@settings(max_examples=10)
def test_the_same_question_has_the_same_answer(launch: dict[str, Any]) -> None:
    assert predicted(**launch) == predicted(**launch)


@given(
    order=st.sampled_from(["raster", "hilbert", "swizzle:3"]),
    rows=st.integers(1, 10),
    cols=st.integers(1, 10),
    sizes=st.tuples(st.integers(0, 2**19), st.integers(0, 2**19)),
)
@settings(max_examples=30)
def test_a_larger_cache_never_reads_more_for_one_worker(
    order: str, rows: int, cols: int, sizes: tuple[int, int]
) -> None:
    small, large = (
        predicted(order, rows, cols, machine(size), workers=1).dram_read_bytes
        for size in sorted(sizes)
    )
    assert large <= small


def test_what_is_asked_for_does_not_depend_on_the_order() -> None:
    on = machine(2**18)
    asked = {
        predicted(order, 9, 7, on).requested_bytes for order in ("raster", "hilbert", "swizzle:2")
    }
    assert asked == {63 * (A_STRIPE + B_STRIPE)}


def test_item_sizes_scale_the_bytes() -> None:
    two, four = (
        predicted("raster", 4, 4, machine(2**30), itemsize=size, out_itemsize=2 * size)
        for size in (2, 4)
    )
    assert four.dram_read_bytes == 2 * two.dram_read_bytes
    assert four.dram_write_bytes == 2 * two.dram_write_bytes == 4 * 16 * OUTPUT


# Pieces of k.

SUMS = 64 * 32 * 4
"""Bytes of the float32 sums that a piece of a tile of `TILE` hands over."""


def predicted_in_pieces(
    grid: tuple[int, int], parts: int, last: int | None, on: Machine, **options: Any
) -> Prediction:
    pieces = schedules.split_k(schedules.hilbert(*grid), PROBLEM_K // TILE[2], parts, last)
    return predict(pieces, machine=on, **({"tile": TILE, "k": PROBLEM_K} | options))


@pytest.mark.parametrize(("parts", "last"), [(4, None), (3, None), (4, 5), (16, 1)])
@pytest.mark.parametrize("persistence", ["static", "dynamic"])
def test_pieces_read_their_part_of_k_and_hand_over_their_sums_once(
    parts: int, last: int | None, persistence: str
) -> None:
    tiles, handed_over = 6 * 4, (last or 24) * parts * SUMS
    fits, never = (
        predicted_in_pieces((6, 4), parts, last, machine(size), persistence=persistence)
        for size in (2**30, 0)
    )
    asked = tiles * (A_STRIPE + B_STRIPE) + handed_over
    assert fits.requested_bytes == never.requested_bytes == asked
    assert fits.dram_read_bytes == fits.compulsory_read_bytes == 6 * A_STRIPE + 4 * B_STRIPE
    assert fits.dram_write_bytes == tiles * OUTPUT
    # Where nothing stays in the L2, sums are written to memory and read from it.
    assert never.dram_read_bytes == never.requested_bytes - never.merged_bytes
    assert never.dram_write_bytes == tiles * OUTPUT + handed_over
    # What is looked up is what is asked for, but for merged reads, and what is stored.
    looked_up = fits.requested_bytes - fits.merged_bytes + tiles * OUTPUT + handed_over
    assert fits.l2_sectors == pytest.approx(looked_up / 32, abs=1)


def test_what_reads_other_parts_of_k_shares_nothing() -> None:
    # All of k in turn by one part each: nothing is read twice, as the ideal has it.
    result = predicted_in_pieces((1, 1), 16, None, machine(0, sms=16))
    read = result.requested_bytes - 16 * SUMS
    assert (read, result.merged_bytes) == (A_STRIPE + B_STRIPE, 0)
    assert model.k_tiling_intensity(64, 32) == 64 * 32 * PROBLEM_K / (read / 2)
    # Those of one part share it, like tiles: a row of them reads its part of A once.
    row = predicted_in_pieces((1, 8), 4, None, machine(0, gpcs=1), persistence="none")
    whole = predicted("raster", 1, 8, machine(0, gpcs=1), persistence="none")
    assert row.merged_bytes == pytest.approx(whole.merged_bytes, rel=0.2)
    assert whole.merged_bytes > 0.6 * 8 * A_STRIPE


def test_pieces_fill_the_last_wave() -> None:
    # Eight workers, and eleven tiles: the last three are half of another wave, or an eighth.
    whole, cut = predicted("raster", 1, 11, machine(0)), {}
    for parts in (2, 8):
        cut[parts] = predicted_in_pieces((1, 11), parts, 3, machine(0))
    assert (whole.waves, whole.tail, whole.balance) == (2, 5 / 8, 11 / 16)
    assert (cut[2].waves, cut[2].tail, cut[2].balance) == (2, 2 / 8, 11 / (8 * 1.5))
    assert (cut[8].waves, cut[8].tail, cut[8].balance) == (4, 0, 1)
    all_cut = predicted_in_pieces((1, 11), 8, None, machine(0))
    assert (all_cut.waves, all_cut.balance) == (11, 1)


def test_pieces_wait_for_the_tiles_that_are_whole() -> None:
    # Two workers idle while six tiles are computed, and then ten pieces are two waves.
    result = predicted_in_pieces((1, 11), 2, 5, machine(0))
    assert (result.waves, result.tail, result.balance) == (3, 6 / 8, 11 / (8 * 2))
    # One worker has nobody's reads to join: its own are over.
    assert predicted_in_pieces((1, 2), 2, 1, machine(0), workers=1).merged_bytes == 0


def test_the_time_of_a_piece_varies_as_that_of_a_shorter_tile(rng: np.random.Generator) -> None:
    shares = np.repeat([1.0, 0.25], 4000)
    pace = model_pace.pace_of(
        tiles=8000, workers=1, loads=1 / 64, k=8192, shares=shares, speed_spread=0.0, rng=rng
    )
    whole, quarters = np.std(np.reshape(pace.tile, (2, 4000)), axis=1)
    assert quarters == pytest.approx(2 * whole, rel=0.1)


def test_tiles_in_one_piece_are_whole() -> None:
    whole = predict(schedules.hilbert(5, 7), machine=H200, tile=TILE, k=PROBLEM_K)
    assert predicted_in_pieces((5, 7), 1, None, H200) == whole


def test_a_cluster_without_multicast_cuts_the_tile_of_each_cta() -> None:
    result = predicted_in_pieces((2, 3), 4, 5, machine(0), cluster=(2, 1), multicast=False)
    asked = 12 * (A_STRIPE + B_STRIPE) + 10 * 4 * SUMS
    assert result.requested_bytes == asked
    assert result.dram_write_bytes == 12 * OUTPUT + 10 * 4 * SUMS


HALVES = schedules.split_k(schedules.raster(1, 2), 16, 2)


@pytest.mark.parametrize(
    ("pieces", "options", "message"),
    [
        (HALVES, {"k": 272}, r"made for 17 steps of k, of 16 in k=272, got 16"),
        (HALVES, {"batch": 2}, "batch must be 1 for pieces of k, got 2"),
        (schedules.Pieces((1, 2), 16, HALVES.table[::-1]), {}, "be pieces as split_k makes them"),
    ],
)
def test_other_pieces_are_refused(
    pieces: schedules.Pieces, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        predict(pieces, machine=H200, **({"tile": TILE, "k": PROBLEM_K} | options))
    with pytest.raises(ValueError, match="schedule must be a Schedule, got Pieces"):
        model.predict_tiles(pieces, machine=H200, tile=TILE, k=PROBLEM_K)  # type: ignore[arg-type]


# How fine and how fast.


@pytest.mark.parametrize(
    ("order", "on", "options"),
    [
        ("raster", H200, {"tile": (256, 128, 64)}),
        ("hilbert", H200, {"tile": (256, 128, 64), "cluster": (1, 2)}),
        ("swizzle:24", H100, {"tile": (128, 256, 64), "persistence": "dynamic"}),
    ],
)
def test_finer_stretches_hardly_change_a_prediction(
    order: str, on: Machine, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, cols = (
        8192 // (options["tile"][side] * options.get("cluster", (1, 1))[side]) for side in range(2)
    )
    # Of one run each: a mean of several would only differ less.
    monkeypatch.setattr(model, "_DRAWS", 1)
    coarse = predicted(order, rows, cols, on, k=8192, **options)
    monkeypatch.setattr(model_problem, "STRETCHES", 4 * model_problem.STRETCHES)
    monkeypatch.setattr(model_problem, "STRETCHES_IN_ALL", 4 * model_problem.STRETCHES_IN_ALL)
    fine = predicted(order, rows, cols, on, k=8192, **options)
    assert fine != coarse
    assert fine.l2_hit_rate == pytest.approx(coarse.l2_hit_rate, abs=0.01)
    assert fine.l2_sectors == pytest.approx(coarse.l2_sectors, rel=0.02)
    assert fine.dram_read_bytes == pytest.approx(coarse.dram_read_bytes, rel=0.05)


@pytest.mark.parametrize(("size", "limit_seconds"), [(8192, 1.0), (16384, 5.0)])
def test_a_prediction_takes_no_longer_than_promised(size: int, limit_seconds: float) -> None:
    order = schedules.hilbert(size // 128, size // 128)
    assert clock.takes_at_most(
        limit_seconds, lambda: predict(order, machine=H100, tile=(128, 128, 64), k=size)
    )


def test_a_huge_launch_still_ends() -> None:
    # Twice as many tiles as get the fewest stretches.
    order = schedules.raster(256, 512)
    assert model_problem.FEWEST_STRETCHES * len(order) == 2 * model_problem.STRETCHES_IN_ALL
    assert clock.takes_at_most(5, lambda: predict(order, machine=H100, tile=(16, 16, 64), k=8192))


def test_the_model_needs_no_jax() -> None:
    code = "import sys, schedules.model; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": (128, 128)}, r"tile must be 3 positive integers, got \(128, 128\)"),
        ({"tile": (128, 0, 64)}, r"tile\[1\] must be an integer of at least 1, got 0"),
        ({"tile": 128}, "tile must be 3 positive integers, got 128"),
        ({"k": 0}, "k must be an integer of at least 1, got 0"),
        ({"k": 8192.0}, r"k must be an integer of at least 1, got 8192\.0"),
        ({"cluster": (2,)}, r"cluster must be 2 positive integers, got \(2,\)"),
        ({"cluster": (2, -1)}, r"cluster\[1\] must be an integer of at least 1, got -1"),
        ({"cluster": (16, 16)}, "cluster_size must be at most the 132 SMs of H200, got 256"),
        ({"persistence": "sometimes"}, "persistence must be 'none' or 'static' or 'dynamic'"),
        ({"workers": 0}, "workers must be an integer of at least 1, got 0"),
        ({"workers": 133}, "workers must be at most the 132 clusters of 1 x 1 CTAs that H200"),
        ({"multicast": 1}, "multicast must be True or False, got 1"),
        ({"itemsize": 0}, "itemsize must be an integer of at least 1, got 0"),
        ({"out_itemsize": -2}, "out_itemsize must be an integer of at least 1, got -2"),
        ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
        ({"machine": "H200"}, "machine must be a Machine such as machines.H200, got 'H200'"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    legal = {"machine": H200, "tile": TILE, "k": PROBLEM_K}
    with pytest.raises(ValueError, match=message):
        predict(schedules.raster(4, 4), **(legal | options))


def test_a_bare_array_is_no_schedule() -> None:
    with pytest.raises(ValueError, match="schedule must be a Schedule or Pieces, got array"):
        predict(schedules.raster(1, 1).order, machine=H200, tile=TILE, k=PROBLEM_K)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sms": 0}, "sms must be an integer of at least 1, got 0"),
        ({"l2_bytes": -1}, "l2_bytes must be an integer of at least 0, got -1"),
        ({"l2_partitions": 0}, "l2_partitions must be an integer of at least 1, got 0"),
        ({"gpcs": 7}, "gpcs must be a multiple of l2_partitions=2, got 7"),
        ({"clock_hz": 0.0}, r"clock_hz must be above 0, got 0\.0"),
        ({"dram_bytes_per_second": -1.0}, r"dram_bytes_per_second must be above 0, got -1\.0"),
        ({"speed_spread": 1.0}, r"speed_spread must be from 0 to below 1, got 1\.0"),
    ],
)
def test_impossible_machines_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(H200, **fields)


def test_machines_are_found_by_name() -> None:
    assert model.machine_named("h200") is model.machine_named("H200") is H200
    with pytest.raises(ValueError, match=r"one of h100, .*, gb300, got 'A100'"):
        model.machine_named("A100")


# Closed forms.


def test_intensity_of_tiling_the_output() -> None:
    # It depends on the tile alone: B_M B_N / (B_M + B_N).
    assert model.mn_tiling_intensity(8192, 4096, 64, 16) == pytest.approx(128 * 256 / (128 + 256))
    assert model.mn_tiling_intensity(8192, 4096, 1, 1) == model.k_tiling_intensity(8192, 4096)
    assert model.k_tiling_intensity(300, 600) == 200


def test_intensity_agrees_with_what_workers_ask_for() -> None:
    result = predicted("raster", 4, 8, machine(2**20))
    multiply_adds = (4 * 64) * (8 * 32) * PROBLEM_K
    assert model.mn_tiling_intensity(4 * 64, 8 * 32, 4, 8) == pytest.approx(
        multiply_adds / (result.requested_bytes / 2)
    )


@pytest.mark.parametrize(
    ("log", "tiles", "reuse"), [(0, (9, 9), 1), (3, (64, 64), 15), (3, (4, 64), 11), (5, (2, 3), 4)]
)
def test_reuse_of_the_shift_swizzle(log: int, tiles: tuple[int, int], reuse: int) -> None:
    assert model.log_swizzle_reuse(log, *tiles) == reuse


@pytest.mark.parametrize(
    ("form", "arguments", "message"),
    [
        ("mn_tiling_intensity", (0, 8, 1, 1), "m must be an integer of at least 1, got 0"),
        ("mn_tiling_intensity", (8, 8, 9, 1), "tiles_m must be at most the 8 elements it cuts"),
        ("mn_tiling_intensity", (8, 8, 1, 0), "tiles_n must be an integer of at least 1, got 0"),
        ("k_tiling_intensity", (8, -1), "n must be an integer of at least 1, got -1"),
        ("log_swizzle_reuse", (-1, 8, 8), "log must be an integer of at least 0, got -1"),
        ("log_swizzle_reuse", (1, 0, 8), "tiles_m must be an integer of at least 1, got 0"),
    ],
)
def test_closed_forms_refuse(form: str, arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(model, form)(*arguments)


def test_the_pace_of_workers_is_told_what_both_sides_of_a_tile_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, right = [], model.pace_of

    def pace_of(**given: Any) -> Any:
        told.append(given["loads"])
        return right(**given)

    monkeypatch.setattr(model, "pace_of", pace_of)
    predict(schedules.raster(4, 4), machine=H200, tile=(64, 256, 64), k=64)
    assert set(told) == {1 / 64 + 1 / 256}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_gpc_gets_its_share_of_clusters(size: int) -> None:
    cluster = (size, 1)
    crew = model._Crew.checked(H200, cluster, None, multicast=True)
    found = crew.gpcs(H200, np.random.default_rng(0))
    counts = np.bincount(found, minlength=H200.gpcs)
    # CTAs that follow each other share a pair of SMs: two alone, or one cluster.
    together = 2 if size == 1 else 1
    assert counts.max() - counts.min() <= together
    assert len(found) == crew.clusters


def test_machines_are_told_apart_by_name() -> None:
    assert len(machines.MACHINES) == len(machines._ALL)
