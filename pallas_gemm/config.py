"""`GemmConfig`: how a product is computed, and the one statement of what is legal."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from pallas_gemm.device import Device
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule, Pieces, Schedule, Triangle, unsplit
from schedules.spec import ONLINE, is_table_of_all, parse, resolve

Persistence = Literal["none", "static", "dynamic"]

CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
STORE_COLUMNS = (64, 32, 16)
"""How many columns of the result may be stored at once."""
FITTING: Any = None
"""The default of a field that depends on the other fields: found when a config is made."""
WHOLE, PAIR = int | None, tuple[int, int]
"""Types of fields: to write them anew for each config would take longer than to check it."""
STEP_BYTES = 128
"""Bytes of the contracted dimension per step: one swizzle atom, for every element type."""
CUTTING = ("split_k", "partial_sums")
"""The fields that cut every sum along k, as far as a config has them."""


class Joined(NamedTuple):
    """How the sums of a tile that is cut along k are joined.

    Attributes:
        chunks: Parts of a CTA's tile that are joined at a time.
        at_once: Warpgroups of a CTA, of which each joins one.
        sums: Elements of one of its summands.
    """

    chunks: int
    at_once: int
    sums: int


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """The settings that the kernels of all architectures have.

    A config that no product can be computed with is refused here, when it is made. `check` refuses
    one that does not suit a product and a GPU. `dataclasses.replace` keeps what was found for a
    default that depends on other fields.

    >>> dataclasses.replace(HopperConfig(tile=(128, 128)), schedule="hilbert").stages
    4

    Attributes:
        LARGEST: The largest tile of an architecture.
        OWN_ORDER: Its kernel launches a cluster per tile, in an order of its own.
        tile: Rows and columns of the sums of one CTA; two columns for each of a gated result.
        stages: Slots of the ring that TMA fills; by default the usual number, or those that fit.
        cluster: (rows, cols) of CTAs that share operands by multicast.
        persistence: "none" launches a cluster per tile; "static" deals the tiles to the clusters
            that fit on the device; "dynamic" hands them out as clusters become free.
        schedule: The order of the cluster tiles, those of a batch one below the other: a name that
            `schedules.spec` knows, or a `Schedule` or an `OnlineSchedule` of this grid. Orders of
            names that begin with "online_" are computed; others are read from a table.
        ctas: At most how many CTAs a persistent kernel launches; None for all that fit.
        store_columns: Columns of the result that one store slot of the epilogue holds: 16, 32 or
            64; by default the most that leave enough shared memory for the stages.
        store_slots: Store slots per warpgroup that stores.
        split_k: Into how many pieces the k loop of each tile is cut, which different clusters
            compute. A second kernel adds up their sums, in float32 and always in the same order.
        split_last: How many tiles are cut, the last ones of the order, so that a wave that is not
            full keeps all SMs busy; None for all. A kernel of its own computes the others.
    """

    LARGEST: ClassVar[tuple[int, int]] = (256, 256)
    OWN_ORDER: ClassVar[bool] = False

    tile: tuple[int, int] = (128, 256)
    stages: int = 4
    cluster: tuple[int, int] = (1, 1)
    persistence: Persistence = "static"
    schedule: str | Schedule | OnlineSchedule = "swizzle:8"
    ctas: int | None = None
    store_columns: int = 64
    store_slots: int = 2
    split_k: int = 1
    split_last: int | None = None

    def __post_init__(self) -> None:
        for field in _fields(type(self)):
            value = getattr(self, field.name)
            if value is not field.default and type(value) is not field.type:
                self._set(field.name, _checked(field, value))
        self._refuse(self._malformed())
        self._fit()
        self._refuse(self._impossible())

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _refuse(self, reasons: Iterator[str]) -> None:
        if text := "; ".join(reasons):
            raise ValueError(f"{type(self).__name__}: {text}")

    def _fit(self) -> None:
        """Finds the values of fields that depend on others and are not given."""

    @property
    def overlap(self) -> Literal["late", "turns", "other"]:
        """The work that a CTA does while a tile is stored, where planning tells modes apart.

        "late": its consumers' next tile; "turns": the other consumer's; "other": whatever else.
        """
        return "other"

    @property
    def cluster_size(self) -> int:
        """CTAs per cluster."""
        return self.cluster[0] * self.cluster[1]

    def tile_k(self, problem: Problem) -> int:
        """Contracted elements per step."""
        return STEP_BYTES // problem.a_dtype.itemsize

    def steps(self, problem: Problem) -> int:
        """Steps of k of a tile; what lies beyond the edge in the last one is zeros."""
        return -(-problem.k // self.tile_k(problem))

    def as_computed(self, problem: Problem) -> Problem:
        """The problem as the kernel computes it; tile, cluster and schedule refer to it."""
        return problem

    def out_tile(self, problem: Problem) -> tuple[int, int]:
        """Rows and columns of the result that one CTA computes at a time."""
        return self.tile[0], self.tile[1] // problem.sums

    def scaling_cycles(self, problem: Problem) -> float:
        """Cycles of a step in which the tensor cores wait while sums of blocks are scaled."""
        del problem  # Kernels that scale none have none.
        return 0.0

    def awaited_cycles(self, problem: Problem) -> float:
        """Cycles that a step takes at least, because scales of blocks arrive no sooner."""
        del problem  # Likewise.
        return 0.0

    @property
    def loaded_columns(self) -> int:
        """Columns of the right operand that a CTA loads for a tile."""
        return self.tile[1]

    def grid(self, problem: Problem) -> tuple[int, int]:
        """Rows and columns of cluster tiles of one product."""
        problem = self.as_computed(problem)
        rows, cols = self.out_tile(problem)
        height = rows * self.cluster[0]
        # Tiles of one group do not reach into the next: each may leave all but one row of a tile.
        longest = problem.m + (height - 1) * problem.groups
        whole = longest // height if problem.groups else -(-longest // height)
        return whole, -(-problem.n // (cols * self.cluster[1]))

    def reach(self, problem: Problem) -> tuple[int, int]:
        """How many rows and columns all tiles of a product have, those beyond its edges too."""
        tiles = zip(self.grid(problem), self.cluster, self.out_tile(problem), strict=True)
        rows, cols = map(math.prod, tiles)
        return rows, cols

    def stacked_grid(self, problem: Problem) -> tuple[int, int]:
        """Rows and columns of cluster tiles of the whole batch: the grid of the schedule."""
        rows, cols = self.grid(problem)
        return rows * problem.batch, cols

    def triangle(self, problem: Problem) -> Triangle | None:
        """Which cluster tiles of the stacked grid are computed; None if all of them are."""
        problem = self.as_computed(problem)
        if not problem.symmetric:
            return None
        tile, cluster = self.out_tile(problem), self.cluster
        return Triangle(self.grid(problem)[0], (tile[0] * cluster[0], tile[1] * cluster[1]))

    def tiles(self, problem: Problem) -> int:
        """How many cluster tiles of the whole batch are computed."""
        grid, triangle = self.stacked_grid(problem), self.triangle(problem)
        return math.prod(grid) if triangle is None else triangle.tiles(grid)

    @property
    def is_online(self) -> bool:
        """Whether the order is computed by the kernel instead of read from a table."""
        given = self.schedule
        return (parse(given) if isinstance(given, str) else given).is_online

    def reordered(self, schedule: str | Schedule | OnlineSchedule) -> Self:
        """The config with another order, and without what this order does not allow."""
        config = dataclasses.replace(self, schedule=schedule)
        if not config.is_online or self.split_last is None:
            return config
        return dataclasses.replace(config, split_k=1, split_last=None)

    def resolve_schedule(self, problem: Problem) -> Schedule | OnlineSchedule:
        """The order of the cluster tiles of the whole batch."""
        order, triangle = self.schedule, self.triangle(problem)
        if isinstance(order, str):
            order = self._named_order(order, problem)
        if triangle is None or isinstance(order, OnlineSchedule):
            return order
        return order.within(triangle)

    def _named_order(self, name: str, problem: Problem) -> Schedule | OnlineSchedule:
        if problem.in_groups:
            # Which tiles there are, and of which groups, is known when the kernel starts.
            name = ONLINE + name.removeprefix(ONLINE)
        return resolve(name, *self.stacked_grid(problem))

    def pieces(self, problem: Problem) -> int:
        """How many pieces of work there are: cluster tiles, unless they are cut along k."""
        tiles = self.tiles(problem)
        return tiles + (self.split_last or tiles) * (self.split_k - 1)

    @property
    def cuts_all_tiles(self) -> bool:
        """Whether every tile is cut along k."""
        return self.split_k > 1 and self.split_last is None

    def summands(self, problem: Problem) -> int:
        """How many sums of a tile that is cut along k are handed over to be joined."""
        del problem  # Kernels that hand over one for each piece need not ask.
        return self.split_k

    def joined(self, problem: Problem) -> Joined:
        """How the tiles of a CTA are joined, where they are cut along k."""
        chunks = self.out_tile(problem)[1] // self.store_columns
        return Joined(chunks, 1, self.tile[0] * self.store_columns * problem.sums)

    def workers(self, problem: Problem, device: Device) -> int:
        """How many clusters are launched."""
        pieces = self.pieces(problem)
        if self.persistence == "none":
            return pieces
        fit = device.coresident_clusters(self.cluster_size)
        if self.ctas is not None:
            fit = min(fit, self.ctas // self.cluster_size)
        return min(pieces, fit)

    def refusals(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Returns every reason why this config cannot compute `problem` on `device`."""
        if 0 in self.stacked_grid(problem):
            return (f"m, n and batch must be positive, got {problem.out_shape}",)
        reasons = (
            *self._order_refusals(problem),
            *self._cut_refusals(problem),
            *self._parts_refusals(problem),
        )
        if self.persistence != "none" and device.coresident_clusters(self.cluster_size) < 1:
            reasons += (f"cluster: {device.kind} runs no cluster of {self.cluster}",)
        return reasons

    def takes(self, problem: Problem, device: Device) -> bool:
        """Whether this config can compute `problem` on `device`."""
        return not self.refusals(problem, device)

    def mismatches(self, pieces: Pieces, problem: Problem) -> Iterator[str]:
        """Yields why a table of pieces is not what this config cuts tiles into, in some order."""
        grid, steps, depth = self.stacked_grid(problem), self.steps(problem), self.tile_k(problem)
        if pieces.grid != grid:
            yield f"schedule must be made for the grid {grid}, got {pieces.grid}"
        if pieces.steps != steps:
            least, most = (pieces.steps - 1) * depth + 1, pieces.steps * depth
            yield (
                f"schedule must be made for {steps} steps of k, of {depth} in k={problem.k}, got"
                f" {pieces.steps}, which are those of k={least} to {most}"
            )
        _, parts, last = unsplit(pieces)
        if (self.split_k, self.split_last) != (parts, last):
            yield (
                f"schedule cuts tiles as split_k={parts} and split_last={last} do, got"
                f" split_k={self.split_k} and split_last={self.split_last}"
            )

    def check(self, problem: Problem, device: Device) -> None:
        """Raises `ValueError` with every reason why this config cannot compute `problem`."""
        if reasons := self.refusals(problem, device):
            raise ValueError(f"config cannot compute this problem: {'; '.join(reasons)}")

    def _memory_refusals(self, needed: int, device: Device) -> Iterator[str]:
        if needed > device.shared_memory:
            yield (
                f"shared memory: needs {needed} bytes of {device.shared_memory};"
                f" fewer stages than {self.stages} or a smaller tile than {self.tile} would fit"
            )

    def _malformed(self) -> Iterator[str]:
        """Yields the reasons why a config makes no sense, before anything else is asked of it."""
        if self.cluster not in CLUSTERS:
            yield f"cluster must be one of {CLUSTERS}, got {self.cluster}"
        sizes = zip(self.tile, self.LARGEST, strict=True)
        if not all(1 <= size <= most for size, most in sizes):
            yield f"tile must be from (1, 1) to {self.LARGEST}, got {self.tile}"
        if self.persistence not in ("none", "static", "dynamic"):
            yield f"persistence must be 'none', 'static' or 'dynamic', got {self.persistence!r}"
        if self.split_k < 1:
            yield f"split_k must be at least 1, got {self.split_k}"
        if self.split_last is not None and self.split_last < 1:
            yield f"split_last must be at least 1, or None for all tiles, got {self.split_last}"

    def _impossible(self) -> Iterator[str]:
        """Yields the other reasons why a config is illegal whatever the problem."""
        if self.ctas is not None and self.ctas < self.cluster_size:
            yield f"ctas must be at least one cluster ({self.cluster_size}), got {self.ctas}"
        if self.store_columns not in STORE_COLUMNS:
            yield f"store_columns must be one of {STORE_COLUMNS}, got {self.store_columns}"
        if self.store_slots < 1:
            yield f"store_slots must be at least 1, got {self.store_slots}"
        if self.split_k > 1 and self.persistence != "static":
            yield (
                f"split_k needs persistence='static', got split_k={self.split_k} and"
                f" persistence={self.persistence!r}"
            )
        if self.split_last is not None and self.split_k == 1:
            yield f"split_last needs split_k of at least 2, got split_last={self.split_last}"

    def _order_refusals(self, problem: Problem) -> tuple[str, ...]:
        """Returns the reasons why the order of the tiles is illegal."""
        grid, order, wanted = self.stacked_grid(problem), self.schedule, self.triangle(problem)
        if isinstance(order, str):
            try:
                if not problem.in_groups and is_table_of_all(order, *grid):
                    return ()
                order = self._named_order(order, problem)
            except ValueError as error:
                # Such as a grid with more rows than an entry of a table has bits for.
                batch = f"; rows are those of a batch of {problem.batch}" * (problem.batch > 1)
                return (f"schedule: {error}{batch}",)
        elif order.grid != grid:
            return (f"schedule must be made for the grid {grid}, got {order.grid}",)
        elif problem.in_groups and not order.is_online:
            return ("schedule must be a name or an OnlineSchedule for groups",)
        if isinstance(order, OnlineSchedule):
            if wanted is not None:
                return ("a symmetric result needs a schedule that is a table, got an online one",)
        elif order.triangle not in (None, wanted):
            return (f"schedule must visit {wanted or 'every tile'}, got one of {order.triangle}",)
        return ()

    def _cut_refusals(self, problem: Problem) -> Iterator[str]:
        """Yields the reasons why the pieces of k are illegal."""
        if self.split_k == 1:
            return
        steps = self.steps(problem)
        if self.split_k > steps:
            yield (
                f"split_k must be at most {steps}, the steps of {self.tile_k(problem)} in"
                f" k={problem.k}, got {self.split_k}"
            )
        if problem.symmetric:
            yield f"split_k must be 1 for a symmetric result, got {self.split_k}"
        if self.split_last is None:
            return
        if self.split_last >= (tiles := self.tiles(problem)):
            yield (
                f"split_last must be below the {tiles} cluster tiles of the result, got"
                f" {self.split_last}; split_last=None cuts all of them"
            )
        if self.is_online:
            yield f"split_last needs a schedule that is a table, got {self.schedule!r}"

    @property
    def summed_in(self) -> tuple[int, ...]:
        """Into how many parts each field that cuts sums along k cuts them."""
        return tuple(getattr(self, name) for name in CUTTING if hasattr(self, name))

    def _parts_refusals(self, problem: Problem) -> Iterator[str]:
        """Why sums are not made in the parts that are promised.

        A part has the same borders whether its CTA makes others or not, and parts are added in the
        same order. So only their number makes a difference.
        """
        if not problem.parts:
            return
        promise = (
            f"numerics promises that each sum over k={problem.k} is made in {problem.parts}"
            f" part{'s' * (problem.parts > 1)}"
        )
        if math.prod(self.summed_in) != problem.parts or self.split_last is not None:
            fields = [name for name in (*CUTTING, "split_last") if hasattr(self, name)]
            yield (
                f"{promise}: {' times '.join(fields[:-1])} has to be that, and nothing else may cut"
                f" it, got {', '.join(f'{name}={getattr(self, name)}' for name in fields)}"
            )
        elif self.split_k not in (1, problem.parts) and not self.is_online:
            yield (
                f"{promise}, of which a piece makes several only in an order that is computed, such"
                f" as 'online_swizzle:8', got {self.schedule!r}"
            )


_fields = functools.cache(dataclasses.fields)


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """Returns the value of a field as its type says; raises `TypeError` if it is of another.

    The only place that checks them, whoever makes a config: a call, a table, a command line.
    """
    name, kind = field.name, field.type
    if kind is bool:
        if isinstance(value, bool | np.bool_):
            return bool(value)
        raise TypeError(f"{name} must be True or False, got {value!r}")
    if kind is int or kind == WHOLE:
        if _is_whole(value):
            return int(value)
        legal = "an integer" if field.default is not None else "an integer or None"
        raise TypeError(f"{name} must be {legal}, got {value!r}")
    if kind == PAIR:
        if isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_whole, value)):
            return tuple(map(int, value))
        raise TypeError(f"{name} must be a pair of integers such as (2, 1), got {value!r}")
    if kind is Persistence:
        if isinstance(value, str):
            return value
        raise TypeError(f"{name} must be 'none', 'static' or 'dynamic', got {value!r}")
    return checked_order(value)


def checked_order(value: Any) -> str | Schedule | OnlineSchedule:
    """Checks an order of whole tiles, as far as that goes without a grid.

    Raises:
        TypeError: It is no order.
        ValueError: It is the name of none.
    """
    if isinstance(value, str):
        parse(value)
    elif isinstance(value, Pieces):
        raise TypeError(
            "schedule of a config must be an order of whole tiles, got Pieces: set split_k and"
            " split_last, or give the pieces to the call, as its schedule"
        )
    elif not isinstance(value, Schedule | OnlineSchedule):
        raise TypeError(
            "schedule must be a name such as 'swizzle:8', a Schedule or an OnlineSchedule, got"
            f" {value!r:.80}"
        )
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
