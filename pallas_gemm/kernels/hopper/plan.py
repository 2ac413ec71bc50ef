"""`HopperPlan`: everything about a launch that follows from problem, config and device."""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple, Self

import jax

from pallas_gemm.kernels import protocol, work
from pallas_gemm.kernels.exchange import ALONE, Exchange
from pallas_gemm.kernels.functions import shorter, words
from pallas_gemm.kernels.hardware import WGMMA_ROWS
from pallas_gemm.kernels.hopper.block_scales import BlockScales
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.problems import is_narrow, stored_by_tma
from pallas_gemm.kernels.operand import OperandPlan
from pallas_gemm.kernels.plan import KernelPlan
from pallas_gemm.kernels.windows import WHOLE, Window

MOST_PIECES_OF_GROUP = 4
"""The most pieces of a crowded group's tile: a piece waits for the one before it."""
SHORTEST_PIECE = 32
"""The fewest steps of such a piece."""
ENDING = 2
"""Steps that could be taken while a tile is ended and stored."""


class Chunk(NamedTuple):
    """A part of a consumer's tile that is stored at once."""

    row: int
    rows: int
    col: int
    cols: int


class Relay(NamedTuple):
    """How crowded groups are cut along k.

    Attributes:
        groups: How many there are at most.
        pieces: Into how many one is cut at most.
        rows: Rows of the table that it takes beyond one for each group, at most.
        steps: The most steps of a group that is not cut.
        tile_k: Contracted elements per step.
        multiple: Where loads of a group begin: see `work.SumCoding`.
    """

    groups: int
    pieces: int
    rows: int
    steps: int
    tile_k: int
    multiple: int = work.ROWS_READ


@dataclasses.dataclass(frozen=True)
class HopperPlan(KernelPlan):
    """See `KernelPlan`; the problem is `config.as_computed` of the one given.

    The simulator knows neither atomics nor two views of one buffer: tiles that would be claimed are
    dealt.

    Attributes:
        exchange: The other devices that it exchanges rows with.
        window: Which arrays are larger than what the kernel takes of them.
    """

    config: HopperConfig
    exchange: Exchange = ALONE
    window: Window = WHOLE

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "problem", self.config.as_computed(self.problem))
        if self.config.mirrored:
            object.__setattr__(self, "window", self.window.mirrored())
        if self.window.moves and self.joins:
            raise ValueError(
                f"split_k must be 1 where parts of arrays are taken, got {self.config.split_k}"
            )
        if self.joins and self.exchange.size > 1:
            raise ValueError(
                f"split_k must be 1 where devices exchange rows, got {self.config.split_k}"
            )
        if self.config.persistence != "static" and self.gathers:
            # CTAs that are not yet running send nothing.
            raise ValueError(
                "persistence must be 'static' where rows are gathered, got"
                f" {self.config.persistence!r}"
            )
        if self.config.early_launch and self.exchange.size > 1:
            raise ValueError("early_launch must be False where devices exchange rows, got True")

    @property
    def launched_early(self) -> bool:
        """Whether the kernel is launched before the one before ends; never in the simulator."""
        return self.config.early_launch and not self.simulated

    @property
    def claims_tiles(self) -> bool:
        """Whether clusters claim their tiles."""
        return self.config.persistence == "dynamic" and self.shares_words

    @functools.cached_property
    def a(self) -> OperandPlan:
        """How the left operand is loaded."""
        transposed = self.problem.transpose_a
        return OperandPlan(
            dtype=self.problem.a_dtype,
            tile=self.config.tile[0],
            tile_k=self.tile_k,
            k_major=not transposed,
            paneled=transposed,
            multicast_axis="cluster_col" if self.config.cluster[1] > 1 else None,
            simulated=self.simulated,
        )

    @functools.cached_property
    def b(self) -> OperandPlan:
        """How the right operand is loaded."""
        return OperandPlan(
            dtype=self.problem.b_dtype,
            tile=self.config.tile[1] // self.problem.sums,
            tile_k=self.tile_k,
            k_major=self.problem.transpose_b,
            paneled=False,
            multicast_axis="cluster_row" if self.config.cluster[0] > 1 else None,
            one_box=is_narrow(self.problem),
            parts=self.problem.sums,
            simulated=self.simulated,
        )

    @property
    def factors(self) -> int:
        """How many arrays are multiplied."""
        return self.problem.pairs * (1 + self.b.parts)

    @property
    def term_steps(self) -> tuple[int, ...]:
        """The steps of each product of a sum, a whole number of them, or those of the only one."""
        terms = self.problem.terms
        return tuple(size // self.tile_k for size in terms) if terms else (self.k_steps,)

    @property
    def small_steps(self) -> int:
        """The steps of all terms but the largest, where operands are sums of arrays."""
        return sum(self.term_steps[:-1])

    def only(self, tiles: Literal["whole", "cut"]) -> Self:
        """See `KernelPlan`; the sums of pieces are handed over at once."""
        late_store = self.config.late_store and tiles == "whole"
        config = dataclasses.replace(self.config, late_store=late_store)
        return dataclasses.replace(self, config=config, computes=tiles)

    @property
    def parts_of_piece(self) -> int:
        """See `KernelPlan`."""
        return self.config.partial_sums if self.joins and self.problem.parts else 1

    @functools.cached_property
    def relay(self) -> Relay | None:
        """How crowded groups are cut along k, where they would keep few workers busy."""
        problem, tiles = self.problem, math.prod(self.config.grid(self.problem))
        workers = self.device.sms if self.simulated else self.workers
        pieces = min(workers // tiles, MOST_PIECES_OF_GROUP)
        share = tiles * (self.k_steps + ENDING * problem.batch) // workers
        # Handing on takes about as long as the eighth.
        steps = max(share + share // 8, SHORTEST_PIECE)
        # Without flags a worker hands on to itself.
        hands_on = self.claims_tiles if self.shares_words else self.workers == 1
        plain = self.stored_by_tma and problem.epilogue.is_identity
        if not (problem.ragged_k and plain and hands_on) or pieces < 2:
            return None
        # A router that gives each row several groups gives none more than half of the rows.
        if 2 * steps >= self.k_steps:
            return None
        # Of all elements, more than so many steps are this often.
        cuts = (self.k_steps - 1) // steps
        begin = work.sums_begin(self.config, problem)
        return Relay(min(problem.batch, cuts), pieces, cuts, steps, self.tile_k, begin)

    @property
    def handed_on(self) -> int:
        """How many tiles are handed on, at most."""
        return self.relay.groups * math.prod(self.config.grid(self.problem)) if self.relay else 0

    @property
    def summands_shape(self) -> tuple[int, ...]:
        """See `KernelPlan`; of crowded groups each tile has one, which is handed on."""
        shape = super().summands_shape
        if self.relay is None:
            return shape
        return self.handed_on, 1, 1, *shape[3:]

    @property
    def own_steps(self) -> bool:
        """Whether each piece of work says which steps of k it takes."""
        return self.joins or self.spans is not None or self.problem.ragged_k

    @property
    def wgmmas_per_step(self) -> int:
        """Groups of WGMMA that one consumer issues per step."""
        panels = self.config.consumer_tile[0] // WGMMA_ROWS if self.a.paneled else 1
        return panels * self.b.parts

    @property
    def scales(self) -> BlockScales:
        """How a consumer takes the scales of blocks."""
        return BlockScales.of(self.config, self.problem)

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The parts in which a consumer stores its part of the result, in this order."""
        rows, _ = self.consumer_out_tile
        height = WGMMA_ROWS if self.problem.transpose_out or self.problem.symmetric else rows
        return tuple(
            Chunk(row, height, start, width)
            for start, width in self.config.store_chunks(self.problem)
            for row in range(0, rows, height)
        )

    @property
    def chunks_are_squares(self) -> bool:
        """Whether each chunk on the diagonal of a result is a square that the diagonal halves."""
        return {chunk.rows for chunk in self.chunks} == set(self.store_widths)

    @property
    def consumer_out_tile(self) -> tuple[int, int]:
        """The part of the result that one consumer computes at a time."""
        rows, cols = self.config.consumer_tile
        return rows, cols // self.problem.sums

    @functools.cached_property
    def reach(self) -> tuple[int, int]:
        """How many rows and columns all tiles of a product have, those beyond its edges too."""
        return self.config.reach(self.problem)

    @property
    def ends(self) -> tuple[int, int]:
        """Where in a consumer's tile the result ends, downwards and along; 0 if only at its end.

        All tiles begin at multiples of their size: no other place is possible.
        """
        sizes = (self.problem.m, self.problem.n), self.consumer_out_tile
        rows, cols = (size % own for size, own in zip(*sizes, strict=True))
        return rows, cols

    @property
    def left_of_tiles(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What tiles leave of results that are reduced: vectors of each tile beside another.

        There is one for each consumer's tile. Where one element of a row is picked, only the tile
        that has it stores it: there is one vector in all.
        """
        found: list[jax.ShapeDtypeStruct] = []
        program = words.program(self.problem)
        sizes = zip(self.reach, self.consumer_out_tile, strict=True)
        beside = [reach // own for reach, own in sizes]
        batch = (self.problem.batch,) if self.problem.batch > 1 else ()
        for result, is_once in zip(self.problem.reductions, self.stored_once, strict=True):
            axis = 0 if result.kind == "m" else 1
            count = 1 if is_once else beside[1 - axis]
            shape = (count, *batch, self.reach[axis])
            found += [jax.ShapeDtypeStruct(shape, result.dtype)] * program.vectors(result)
        return tuple(found)

    @property
    def stored_once(self) -> tuple[bool, ...]:
        """Whether one tile stores a row's value: that of each reduced result that is picked."""
        program = shorter.shorter(words.program(self.problem))
        return tuple(
            own.value in program.picked and not self.problem.groups for own in program.reductions
        )

    @property
    def loads_into_results(self) -> bool:
        """Whether an operand of the epilogue is loaded into the slots of a result."""
        return not all(self.problem.own_slots)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of what is stored here: of scattered sums, those of each device."""
        if not self.scatters:
            return self.problem.out_shape
        size = self.exchange.size
        return size, self.problem.m // size, self.problem.n

    @property
    def gathers(self) -> bool:
        """Whether the left operand's rows are those of several devices."""
        return self.exchange.size > 1 and self.exchange.gathers

    @property
    def scatters(self) -> bool:
        """Whether the result's rows go to several devices."""
        return self.exchange.size > 1 and not self.exchange.gathers

    @property
    def store_widths(self) -> tuple[int, ...]:
        """The different widths of the chunks, widest first."""
        widths = {chunk.cols for chunk in self.chunks}
        return tuple(sorted(widths, reverse=True))

    def strips(self, columns: int) -> list[slice]:
        """The parts of these columns that an epilogue is applied to, one after the other."""
        width = self.config.finished_columns(self.problem)
        return [slice(start, min(start + width, columns)) for start in range(0, columns, width)]

    @property
    def stored_by_tma(self) -> bool:
        """Whether TMA stores the result, rather than the consumers' threads."""
        return stored_by_tma(self.problem)

    def store_shape(self, width: int, *, transposed: bool) -> tuple[int, ...]:
        """The shape of all store slots, cut up for chunks of `width` columns."""
        slots = self.config.store_slots * (self.config.store_columns // width)
        rows = self.chunks[0].rows
        chunk = (width, rows) if transposed else (rows, width)
        return self.config.consumers, slots, *chunk

    def store_slot(self, chunk: int) -> int:
        """The slot of a chunk, counted in chunks of its width.

        Chunks take the slots in turn. A narrower one begins where a wide one in its slot would.
        """
        slot = chunk % self.config.store_slots
        return slot * (self.config.store_columns // self.chunks[chunk].cols)

    def clipped_length(self, number: int) -> int:
        """How much is left of a line of a chunk that the end of the lines cuts; 0 if it cuts none.

        All tiles begin at multiples of their own size, so that it is always as much.
        """
        chunk = self.chunks[number]
        start, length, tile = chunk.col, chunk.cols, self.consumer_out_tile[1]
        if self.problem.transpose_out:
            start, length, tile = chunk.row, chunk.rows, self.consumer_out_tile[0]
        left = max(self.problem.out_shape[-1] - start, 0) % tile
        return left if left < length else 0

    def stores_in_flight(self, chunk: int) -> int:
        """How many stores may still be read from their slots when a chunk takes its own.

        They are those issued since its slot was last used: by an earlier chunk of the same tile, or
        else by the last chunk of the tile before that had this slot.
        """
        if self.problem.groups and self.simulated:
            # The simulator counts copies, of which a chunk may then be none or several.
            return 0
        slots, chunks = self.config.store_slots, len(self.chunks)
        each = 2 if self.problem.symmetric else len(self.problem.result_dtypes)
        if chunk >= slots:
            return each * (slots - 1)
        last = max(before for before in range(chunks) if before % slots == chunk % slots)
        return each * (chunks - 1 - last + chunk)

    @property
    def full_arrivals(self) -> int:
        """Arrivals that complete `full[s]`."""
        return protocol.full_arrivals(self.a.copies + self.b.copies)

    @property
    def empty_arrivals(self) -> int:
        """Arrivals of this CTA alone on `empty[s]`."""
        return protocol.empty_arrivals(self.config.consumers, pingpong=self.config.pingpong)
