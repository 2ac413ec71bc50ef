"""The study of schedules: which launches are compared, what the model predicts, what was seen."""

import concurrent.futures
import dataclasses
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench import report
from bench.peer import Peer
from bench.peers import Kernel, Xla
from pallas_gemm.config import GemmConfig, Persistence
from pallas_gemm.device import Device
from pallas_gemm.problem import Problem
from pallas_gemm.tuning.measure import Result, Timing
from schedules.model import SECTOR_BYTES, Prediction, machine_named, predict
from schedules.spec import ONLINE, ONLINE_BUILDERS, build

PERSISTENCE: tuple[Persistence, ...] = ("none", "static", "dynamic")
"""The prefix of the name of an order that is computed instead of read from a table."""

DRAM_WEIGHT = 3.0
"""The cost of a byte from device memory, in bytes that the L2 answers."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of the study.

    Attributes:
        order: Name of the order, such as "swizzle:8".
        online: Whether it is computed on the device instead of read from a table.
        config: All else.
    """

    order: str
    online: bool
    config: GemmConfig

    @property
    def name(self) -> str:
        """The key of the results."""
        cluster = "x".join(map(str, self.config.cluster))
        how = "online" if self.online else "offline"
        return f"{self.order}/{how}/{self.config.persistence}/{cluster}"

    @property
    def place(self) -> tuple[str, tuple[int, int]]:
        """The table that it belongs to: persistence and cluster."""
        return self.config.persistence, self.config.cluster


@dataclasses.dataclass(frozen=True)
class Row:
    """A launch, what the model predicts of it, and what was measured.

    Attributes:
        launch: The launch.
        prediction: The model's prediction.
        result: The times, or None if it failed.
        counters: The hardware's counters, if they were read.
    """

    launch: Launch
    prediction: Prediction
    result: Result | None = None
    counters: Mapping[str, float] | None = None


def orders(names: Sequence[str], groups: Sequence[int]) -> list[str]:
    """Returns the orders to study: "swizzle" stands for one of each group size.

    Raises:
        ValueError: A name is no order.
    """
    found = []
    for name in names:
        if name == "swizzle":
            found += [f"swizzle:{group}" for group in groups]
        else:
            build(name, 1, 1)
            found.append(name)
    return found


def launches(
    problem: Problem,
    device: Device,
    base: GemmConfig,
    *,
    orders: Sequence[str],
    persistence: Sequence[Persistence],
    clusters: Sequence[tuple[int, int]],
) -> list[Launch]:
    """Returns every legal launch, those of one table beside each other.

    Orders that exist as arithmetic are launched both ways, unless tiles are handed out while the
    kernel runs: then the kernel needs a table.
    """
    found = []
    for held in persistence:
        for cluster in clusters:
            config = dataclasses.replace(base, persistence=held, cluster=cluster)
            config = deepest(config, problem, device)
            for order in orders:
                for online in (False, True):
                    if online and order.partition(":")[0] not in ONLINE_BUILDERS:
                        continue
                    name = f"{ONLINE}{order}" if online else order
                    chosen = dataclasses.replace(config, schedule=name)
                    if not chosen.refusals(problem, device):
                        found.append(Launch(order, online, chosen))
    return found


def deepest(config: GemmConfig, problem: Problem, device: Device) -> GemmConfig:
    """Returns the config with the most stages that shared memory holds."""
    for stages in range(16, 2, -1):
        deeper = dataclasses.replace(config, stages=stages)
        if not deeper.refusals(problem, device):
            return deeper
    return config


def predictions(
    chosen: Sequence[Launch], problem: Problem, device: Device, processes: int
) -> list[Prediction]:
    """Returns what the model predicts for each launch; orders that are equal are predicted once."""
    questions = [_question(launch, problem, device) for launch in chosen]
    distinct = list(dict.fromkeys(questions))
    if processes > 1:
        # A fork of a process that has threads may hang.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
            answers = list(pool.map(_predict, distinct))
    else:
        answers = list(map(_predict, distinct))
    known = dict(zip(distinct, answers, strict=True))
    return [known[question] for question in questions]


def traffic_cost(l2_sectors: float, dram_read_bytes: float) -> float:
    """Returns what the model ranks orders by: bytes through the L2 and, dearer, from memory."""
    return SECTOR_BYTES * l2_sectors + DRAM_WEIGHT * dram_read_bytes


def tables(rows: Sequence[Row]) -> dict[tuple[str, tuple[int, int]], list[Row]]:
    """Returns the rows by table, in the order in which they came."""
    found: dict[tuple[str, tuple[int, int]], list[Row]] = {}
    for row in rows:
        found.setdefault(row.launch.place, []).append(row)
    return found


Lines = Callable[[Sequence[Row]], list[str]]
"""The columns of a table that are printed."""


def time_lines(rows: Sequence[Row]) -> list[str]:
    """Returns the times of a table's launches."""
    timed = f"{'ms':>7} {'x XLA':>6} {'+-%':>4}"
    return [
        f"{_title(rows)}: time",
        f"{'':26}|{'burst':^19}|{'sustained':^29}".rstrip(),
        f"{'order':18} {'how':7}|{timed}|{timed} {'MHz':>4}{'mJ':>5}",
        *map(_times, rows),
    ]


def traffic_lines(rows: Sequence[Row]) -> list[str]:
    """Returns what a table's launches move, as predicted and as counted."""
    traffic = f"{'hit%':>4} {'Msect':>6} {'GB':>6}"
    return [
        f"{_title(rows)}: L2 and memory",
        f"{'':26}|{'model':^18}|{'counted':^24}".rstrip(),
        f"{'order':18} {'how':7}|{traffic}|{traffic} {'stall':>5}",
        *map(_traffic, rows),
    ]


def _title(rows: Sequence[Row]) -> str:
    """Says what the launches of a table share."""
    (persistence, cluster), config = rows[0].launch.place, rows[0].launch.config
    words = {"none": "not persistent", "static": "static", "dynamic": "dynamic"}[persistence]
    return (
        f"{words}, cluster {cluster[0]}x{cluster[1]}, tile {config.tile[0]}x{config.tile[1]},"
        f" {config.stages} stages"
    )


def choice_lines(rows: Sequence[Row]) -> list[str]:
    """Returns, for each table, the best order measured and how far off the model's choice is."""
    lines = [f"{'launches':12} {'mode':9} {'best measured':18} {'the model chooses':18} {'slower'}"]
    for (persistence, cluster), table in tables(rows).items():
        offline = [row for row in table if not row.launch.online and row.result]
        if len(offline) < 2:
            continue
        by_model = min(
            offline,
            key=lambda row: traffic_cost(row.prediction.l2_sectors, row.prediction.dram_read_bytes),
        )
        for mode in ("burst", "sustained"):
            timed = [row for row in offline if getattr(row.result, mode)]
            if by_model not in timed:
                continue
            best = max(timed, key=lambda row: getattr(row.result, mode).ratio.median)
            loss = _ratio(best, mode) / _ratio(by_model, mode) - 1
            orders = f"{best.launch.order:18} {by_model.launch.order:18}"
            lines.append(f"{persistence:8} {cluster[0]}x{cluster[1]} {mode:9} {orders} {loss:6.2%}")
    return lines if len(lines) > 1 else []


def to_csv(rows: Iterable[Row]) -> str:
    """Returns all rows as CSV."""
    return report.table([*map(_cells, rows)])


def _question(launch: Launch, problem: Problem, device: Device) -> tuple[Any, ...]:
    """Returns what a prediction depends on: order, grid, machine, and what `predict` is told."""
    config = launch.config
    concurrent_clusters = device.coresident_clusters(config.cluster_size)
    how = {
        "tile": (*config.tile, config.tile_k(problem)),
        "k": problem.k,
        "cluster": config.cluster,
        "persistence": config.persistence,
        "workers": min(concurrent_clusters, config.workers(problem, device)),
        "itemsize": problem.a_dtype.itemsize,
        "out_itemsize": problem.out_dtype.itemsize,
    }
    return launch.order, config.grid(problem), device.machine.name, tuple(how.items())


def _predict(question: tuple[Any, ...]) -> Prediction:
    order, grid, machine, how = question
    return predict(build(order, *grid), machine=machine_named(machine), **dict(how))


def _ratio(row: Row, mode: str) -> float:
    return getattr(row.result, mode).ratio.median


def _name(launch: Launch) -> str:
    return f"{launch.order:18} {'online' if launch.online else 'offline':7}"


def _times(row: Row) -> str:
    burst = row.result.burst if row.result else None
    sustained = row.result.sustained if row.result else None
    clock = f"{sustained.clock_hz / 1e6:4.0f}" if sustained and sustained.clock_hz else f"{'-':>4}"
    joules = row.result.joules if row.result else None
    energy = f"{joules * 1e3:5.0f}" if joules is not None else f"{'-':>5}"
    return f"{_name(row.launch)}|{_timed(burst)}|{_timed(sustained)} {clock}{energy}"


def _traffic(row: Row) -> str:
    seen = row.prediction
    return (
        f"{_name(row.launch)}|{seen.l2_hit_rate * 100:4.0f} {seen.l2_sectors / 1e6:6.0f}"
        f" {seen.dram_read_bytes / 1e9:6.2f}|{_counted(row.counters)}"
    )


def _timed(timing: Timing | None) -> str:
    if timing is None:
        return f"{'-':>7}" + " " * 12
    ms, ratio = timing.seconds.median * 1e3, timing.ratio
    return f"{ms:7.3f} {ratio.median:6.3f} {ratio.share * 100:4.1f}"


def _counted(counters: Mapping[str, float] | None) -> str:
    if counters is None:
        return f"{'-':>4}"
    return (
        f"{counters['l2_hit_rate'] * 100:4.0f} {counters['l2_sectors'] / 1e6:6.0f}"
        f" {counters['dram_read_bytes'] / 1e9:6.2f} {counters['long_scoreboard'] * 100:5.1f}"
    )


def _cells(row: Row) -> dict[str, Any]:
    config = row.launch.config
    cells: dict[str, Any] = {
        "order": row.launch.order,
        "how": "online" if row.launch.online else "offline",
        "persistence": config.persistence,
        "cluster": "x".join(map(str, config.cluster)),
        "tile": "x".join(map(str, config.tile)),
        "stages": config.stages,
    }
    for mode in ("burst", "sustained"):
        timing = getattr(row.result, mode) if row.result else None
        cells |= {
            f"{mode}_ms": timing.seconds.median * 1e3 if timing else None,
            f"{mode}_ratio": timing.ratio.median if timing else None,
            f"{mode}_ratio_low": timing.ratio.low if timing else None,
            f"{mode}_ratio_high": timing.ratio.high if timing else None,
            f"{mode}_mhz": timing.clock_hz / 1e6 if timing and timing.clock_hz else None,
        }
    joules = row.result.joules if row.result else None
    cells["mj"] = joules * 1e3 if joules is not None else None
    for field in ("l2_hit_rate", "l2_sectors", "dram_read_bytes"):
        cells[f"model_{field}"] = getattr(row.prediction, field)
    from bench.counters import METRICS

    for name in METRICS:
        cells[f"counted_{name}"] = row.counters[name] if row.counters else None
    return cells


def contestants(chosen: Sequence[Launch], device: Device) -> list[Peer]:
    """Returns XLA and a peer for each launch, which bears the launch's name."""
    return [Xla(), *(Kernel([launch.config], device, launch.name) for launch in chosen)]
