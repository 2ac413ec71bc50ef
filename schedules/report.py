"""Predictions as text: one launch in detail, and a table that ranks orders for the same launch."""

import dataclasses
from collections.abc import Mapping

from schedules.model import (
    SECTOR_BYTES,
    Machine,
    Persistence,
    Prediction,
    mn_tiling_intensity,
)

BAR_WIDTH = 20

RANKINGS = ("dram-read", "l2-sectors", "hit-rate")
"""The columns that a table can be sorted by. The default is what costs most energy, bytes of device
memory."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The launch that orders are compared on.

    Attributes:
        machine: The GPU that it runs on.
        problem: M, N and K.
        tile: Rows and columns of one CTA's tile, and its step along K.
        cluster: CTAs of a cluster along the rows and along the columns.
        persistence: The rule that says which worker gets the next tile.
        multicast: Whether the CTAs of a cluster read what they share once.
    """

    machine: Machine
    problem: tuple[int, int, int]
    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    persistence: Persistence
    multicast: bool

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of cluster tiles, the last ones perhaps partly outside the problem."""
        sides = (self.tile[i] * self.cluster[i] for i in range(2))
        rows, cols = (-(-self.problem[i] // side) for i, side in enumerate(sides))
        return rows, cols

    def headline(self, prediction: Prediction, units: int) -> str:
        """Returns three lines that say what runs, and how it fills the machine.

        Args:
            prediction: The prediction of an order.
            units: How many tiles the order has: all of the grid, or those of a triangle.
        """
        cluster = "no clusters"
        if self.cluster != (1, 1):
            cast = "with" if self.multicast else "without"
            cluster = f"clusters of {_times(self.cluster)} {cast} multicast"
        persistence = "not persistent" if self.persistence == "none" else self.persistence
        rows, cols = self.grid
        is_whole = units == rows * cols
        grid = f"{rows} x {cols} = {units}" if is_whole else f"{units} of {rows} x {cols}"
        full = f"{(1 - prediction.tail) * 100:.0f}% full"
        one = prediction.waves == 1
        waves = f"1 wave, {full}" if one else f"{prediction.waves} waves, the last {full}"
        return (
            f"{self.machine.name}: {_times(self.problem)}\n"
            f"tiles of {_times(self.tile)}, {cluster}, {persistence}\n"
            f"{grid} units of work, {prediction.concurrency} at a time: {waves}"
        )


def ranked(
    predictions: Mapping[str, Prediction], by: str = "dram-read"
) -> list[tuple[str, Prediction]]:
    """Returns (order, prediction) pairs, best first.

    Args:
        predictions: The prediction for each order.
        by: One of `RANKINGS`.
    """
    keys = {
        "dram-read": lambda p: (p.dram_read_bytes, p.l2_sectors),
        "l2-sectors": lambda p: (p.l2_sectors, p.dram_read_bytes),
        "hit-rate": lambda p: (-p.l2_hit_rate, p.dram_read_bytes),
    }
    return sorted(predictions.items(), key=lambda item: keys[by](item[1]))


def ranking(predictions: Mapping[str, Prediction], by: str = "dram-read") -> str:
    """Returns the table of several orders on the same launch, best first.

    Args:
        predictions: The prediction for each order.
        by: One of `RANKINGS`.
    """
    width = max(map(len, ("order", *predictions)))
    most = max(prediction.dram_read_bytes for prediction in predictions.values())
    lines = [f"\n  # {'order':<{width}}  L2 hits  L2 sectors  DRAM read"]
    for place, (order, prediction) in enumerate(ranked(predictions, by), 1):
        read = prediction.dram_read_bytes
        lines.append(
            f"{place:>3} {order:<{width}}  {prediction.l2_hit_rate:>7.1%}  "
            f"{_scaled(prediction.l2_sectors):>10}  {_scaled(read, 'B'):>9}  "
            f"{'█' * max(1, round(BAR_WIDTH * read / most))}"
        )
    least = next(iter(predictions.values())).compulsory_read_bytes
    lines.append(f"\nThe operands alone are {_scaled(least, 'B')}: no order can read less.")
    return "\n".join(lines)


def details(setting: Setting, prediction: Prediction) -> str:
    """Returns everything that is predicted for one order, one line each.

    Args:
        setting: The launch.
        prediction: Its prediction.
    """
    m, n, _ = setting.problem
    tiles_m, tiles_n = -(-m // setting.tile[0]), -(-n // setting.tile[1])
    read = prediction.dram_read_bytes
    looked_up = prediction.l2_sectors * SECTOR_BYTES
    read_seconds = read / setting.machine.dram_bytes_per_second
    rows = {
        "L2 hit rate": f"{prediction.l2_hit_rate:.1%}",
        "L2 sectors": f"{_scaled(prediction.l2_sectors)}, {_scaled(looked_up, 'B')}",
        "asked for by the SMs": _scaled(prediction.requested_bytes, "B"),
        "joined under way": _scaled(prediction.merged_bytes, "B"),
        "between L2 partitions": _scaled(prediction.fabric_bytes, "B"),
        "DRAM read": f"{_scaled(read, 'B')}, {read / prediction.compulsory_read_bytes:.1f} times "
        "the operands",
        "at full bandwidth": f"{read_seconds * 1e3:.3f} ms for what is read from DRAM",
        "DRAM written": _scaled(prediction.dram_write_bytes, "B"),
        "waves": str(prediction.waves),
        "tail": f"{prediction.tail:.1%} of the workers idle in the last wave",
        "balance": f"{prediction.balance:.1%} of the slots have work",
        "arithmetic intensity": f"{mn_tiling_intensity(m, n, tiles_m, tiles_n):.1f} multiply-adds "
        "per element a tile loads",
    }
    width = max(map(len, rows))
    return "\n".join(f"  {label:<{width}}  {text}" for label, text in rows.items())


def _times(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _scaled(count: int, unit: str = "") -> str:
    """Returns a count in three or four digits with the prefix of its size."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.{2 if count < 10 * size else 1}f} {prefix}{unit}"
    return f"{count} {unit}".rstrip()
