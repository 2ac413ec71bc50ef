"""Which bands to walk a grid of tiles in: the order that the heuristics choose.

Two things are shared between tiles, and a band decides both:

- *Waves* share the L2: a band whose rows stay there is read once, and every wave reads the columns
  that it comes to. This counts where there is more than one wave, and the operands are larger than
  the L2.
- *Neighbours* share the way to the L2: SMs of one graphics processing cluster (GPC) whose reads of
  the same data are merged. Consecutive workers are neighbours. Where all tiles are computed at the
  same time, this is all that an order is for, and it matters: 445 x 3072 x 13824 in tiles of
  64 x 192 takes 55 us on an H200 in bands of 4 rows of tiles, and 85 us row after row.
"""

import dataclasses
import math

from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import written
from pallas_gemm.problem import Problem
from schedules.spec import ONLINE

HELD_SHARE = 0.35
"""This share of the L2 holds the operands of a wave for the next one."""
BAND_SHARE = 0.6
"""The rows of a band may take this share of the L2: 16384 cubed runs 4% faster on an H200 in bands
of 8 rows of tiles (34 MB) than of 16, and 8192 cubed as fast in either."""
RAGGED = 1.2
"""The cost of waves that reach into the next band. On an H200, bands of 11 rows are 0.4 to 2.1%
slower than bands of 8 for nine products (K from 12288 to 28672, 128 tiles under way)."""
WIDEST_BAND = 16
"""The most rows or columns of tiles that an order keeps together. In bands of 32 rows of tiles,
4096 x 4096 x 256 takes 16.9 us on an H200. In bands of 16 and of 8, it takes 16.1 and 15.9."""
USUAL_ROWS = 1024
"""Rows of an operand that a band may have however long they are: 8192 x 8192 x 28672 runs 2% faster
on an H200 in bands of 1024 rows than of 640 or of 2048."""
BAND_OF_TRIANGLE = 8
"""Rows of tiles that an order of half of a symmetric result keeps together, over several waves. On
an H200, 4096 cubed by half takes 93.0 us in bands of 8, and 94.8 us in bands of 11. 32 of 1024 x
1024 x 4096, of 8 rows of tiles each, take 212 us in bands of 8, and 227 us in bands of 16."""
BAND_IN_TURNS = 4
"""The same where a small tile is stored while another consumer multiplies its own. With a residual,
one store slot and six stages, 16384 x 4096 x 2048 takes 365 us in bands of 4 rows of tiles, and 409
in bands of 8. 8192 x 6144 x 1536 takes 216 and 231, and 8192 x 4096 x 4096 365 and 393. 24 of 1024
x 4096 x 1024 take as long in either, and so does 8192 x 8192 x 1024. Bands of columns are slower.
"""
ROWS_ALLOWED = 0.08
"""For each element of a CTA's tile, how many rows of both operands the tiles of one GPC may read in
a step. With 0.12 (490 bytes, and 4096 multiplications of two bytes, each cycle) the way to the L2
would take as long as the tensor cores; it tells before. 8192 x 8192 x 1024 has a residual and tiles
of 128 x 128: in bands of 8 or 4 rows of tiles (0.079 and 0.063) it takes 199 us on an H200. It
takes 211 us in bands of 16 (0.133), and 233 us in bands of 16 columns. 24 of 1024 x 4096 x 1024
take 303 us in bands of 8, and 327 us in bands of 11 columns (0.098)."""
ABREAST = 4
"""Waves for which a band may have any rows: CTAs are still about as far as each other, and read the
same part of them. With K of 12288, 14336 and 28672, 4096 x 4096 runs as fast in bands of 16 rows of
tiles as in bands of 8 in bursts. In sustained work it is 0.1 to 1.0% faster."""


def order(problem: Problem, config: GemmConfig, device: Device) -> str:
    """Returns the name of the order in which tiles are computed.

    Rows in groups share the right operand as far as their group goes. 64 and 32 groups of 256 rows
    take 1% longer on an H200 in bands of 8 rows of tiles than in bands of 4. 8 groups of 2048 rows
    take as long in bands of 8 as in bands of 16.

    Wide tiles in turns lie in the widest band that the L2 holds. Logits in float32 of 8192 x 128256
    with K=2048 take 5373 us on an H200 in bands of 8 rows of tiles, and 5293 of 16. A result of
    8192 x 32000 takes 739 and 704 us with K=1024, and with K=4096 2611 and 2612.
    """
    if problem.groups:
        height = config.tile[0] * config.cluster[0]
        return f"swizzle:{min(max(-(-problem.m // (height * problem.groups)), 4), 8)}"
    if problem.ragged_k:
        return "swizzle:8"
    is_hoppers = isinstance(config, HopperConfig)
    by_rows = written.order(problem, mirrored=config.mirrored) if is_hoppers else None
    if by_rows is not None:
        return by_rows
    in_turns = problem.symmetric or config.overlap == "turns"
    if not in_turns or config.tiles(problem) <= config.workers(problem, device):
        return _of_fewest_bytes(problem, config, device)
    if problem.symmetric:
        return f"swizzle:{BAND_OF_TRIANGLE}"
    if config.tile[1] > config.tile[0]:
        return f"swizzle:{_walks(problem, config, device)[0].held_groups()[-1]}"
    return f"swizzle:{BAND_IN_TURNS}"


def _of_fewest_bytes(problem: Problem, config: GemmConfig, device: Device) -> str:
    """Returns the banded order in which the fewest bytes are read, from memory or by neighbours.

    By closed forms: while a band of rows of tiles is walked across, the tiles under way form a
    rectangle. Each wave reads the columns of the right operand that it comes to. It also reads the
    band's rows of the left operand, unless both fit into the part of the L2 where the model of the
    cache (`schedules.model`) finds them again. It reads within 30% of the best such order there.

    Tiles wider than high lie in bands of rows, so that consecutive CTAs share the longer side. In
    tiles of 128 x 256, 14216 x 7168 x 2048 (TN) takes 521 us on an H200 in bands of 16 rows. In
    bands of 16 columns it takes 591 us, though they read a third less of memory in the model. Only
    where no band of rows is as narrow as neighbours want it, columns do: 938 x 14080 x 3072 in
    tiles of 128 x 160 (mirrored) takes 104 us in a band of 6 columns, 108 us in bands of 16 rows.
    """
    walks = _walks(problem, config, device)
    first = walks[0]
    one_wave = first.under_way == first.across * first.along
    shared_alone = one_wave or first.operands <= first.held
    allowed = ROWS_ALLOWED * math.prod(config.tile)
    crosswise = not one_wave and first.height < first.width
    ways = []
    for along, walk in zip(("", ":cols"), walks, strict=True):
        for group in walk.compact_groups() if shared_alone else walk.held_groups():
            shared = walk.shared(group)
            cost = shared if shared_alone else walk.loads(group)
            ways.append((max(shared, allowed), crosswise and bool(along), cost, along, group))
    *_, along, group = min(ways)
    return f"swizzle:{group}{along}"


def rows_of_neighbours(problem: Problem, config: GemmConfig, device: Device) -> float:
    """Returns how many rows of both operands the tiles of one GPC read, on average.

    An order that is no band counts as a compact patch. Where it takes longest to write the result,
    row after row counts so, too, since it is faster than bands there. Where tiles are cut along k,
    neighbours read several parts: one for each tile that has pieces in the GPC.
    """
    by_rows, by_cols = _walks(problem, config, device)
    parts = max(1.0, by_rows.neighbours / (by_rows.across * by_rows.along))
    return parts * _rows_of_a_part(problem, config, by_rows, by_cols)


def _rows_of_a_part(
    problem: Problem, config: GemmConfig, by_rows: "_Walk", by_cols: "_Walk"
) -> float:
    """Returns how many rows of both operands the tiles of one GPC read in one part of k."""
    name, *parts = str(getattr(config.schedule, "name", config.schedule)).split(":")
    name = name.removeprefix(ONLINE)
    numbers = [int(part) for part in parts if part.isdigit()]
    walk = by_cols if "cols" in parts else by_rows
    if name == "raster" and not written.is_large(problem):
        return walk.shared(1)
    if name == "swizzle" and numbers:
        return walk.shared(numbers[0])
    return min(walk.shared(group) for walk in (by_rows, by_cols) for group in walk.compact_groups())


def _walks(problem: Problem, config: GemmConfig, device: Device) -> tuple["_Walk", "_Walk"]:
    rows, cols = config.stacked_grid(problem)
    workers = config.workers(problem, device)
    under_way = min(workers, rows * cols)
    height, width = (n * size for n, size in zip(config.tile, config.cluster, strict=True))
    held = HELD_SHARE * device.machine.l2_bytes / (problem.k * problem.a_dtype.itemsize)
    neighbours = max(1.0, workers / device.machine.gpcs)
    return (
        _Walk(rows, cols, height, width, under_way, held, neighbours),
        _Walk(cols, rows, width, height, under_way, held, neighbours),
    )


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Walking through a grid of tiles in bands.

    Attributes:
        across: Tiles of the grid across the bands.
        along: Tiles of the grid along the bands.
        height: Rows of an operand that a tile reads, across the bands.
        width: Rows of the other operand that it reads.
        under_way: Tiles computed at the same time.
        held: Rows that the L2 holds.
        neighbours: Tiles under way in one GPC.
    """

    across: int
    along: int
    height: int
    width: int
    under_way: int
    held: float
    neighbours: float

    @property
    def operands(self) -> int:
        """How many rows of both operands are under way."""
        return self.across * self.height + self.along * self.width

    def compact_groups(self) -> range:
        """The bands to consider where only neighbours share."""
        return range(1, min(self.across, WIDEST_BAND) + 1)

    def shared(self, group: int) -> float:
        """Returns how many rows of both operands neighbours read in bands of `group` tiles."""
        group = min(group, self.across)
        whole, rest = divmod(self.across, group)
        total = whole * group * self._patch(group) + rest * self._patch(rest)
        return total / self.across

    def _patch(self, group: int) -> float:
        """Returns the rows of both operands that neighbours in one band read."""
        if not group:
            return 0.0
        length = min(float(self.along), max(1.0, self.neighbours / group))
        return min(group, self.neighbours) * self.height + length * self.width

    def held_groups(self) -> range:
        """The bands to consider: those whose rows the L2 holds while they are walked.

        A band that is done before its wave is belongs to the walk the other way: 512 x 128256 x
        4096 runs 9% slower on an H200 in bands of 18 columns of 4 tiles than in one of 4 rows.
        """
        rows = max(USUAL_ROWS, self.held * BAND_SHARE / HELD_SHARE)
        if self.across * self.along <= ABREAST * self.under_way:
            rows = math.inf
        widest = max(1, int(min(self.across, WIDEST_BAND, rows // self.height)))
        return range(min(widest, math.ceil(self.under_way / self.along)), widest + 1)

    def loads(self, group: int) -> float:
        """Returns the rows of both operands that all bands of `group` tiles read from memory."""
        whole, rest = divmod(self.across, group)
        rows = whole * self._band(group) + (self._band(rest) if rest else 0)
        return rows * (RAGGED if self.under_way % group and group < self.across else 1)

    def _band(self, group: int) -> float:
        length = min(self.along, math.ceil(self.under_way / group))
        fits = group * self.height + length * self.width <= self.held
        waves = 1 if fits else self.along / length
        return waves * group * self.height + self.along * self.width
