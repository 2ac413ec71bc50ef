"""`BlackwellConfig`: what the Blackwell kernel can be told, and what of it is legal."""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Self

from pallas_gemm.config import FITTING, STEP_BYTES, STORE_COLUMNS, GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels import element_types
from pallas_gemm.kernels.hardware import MAX_BARRIERS
from pallas_gemm.kernels.refusals import of_sizes, of_symmetry
from pallas_gemm.problem import Problem
from schedules import OnlineSchedule, Schedule

MMA_ROWS = 128
"""Rows of the result per CTA: one for each lane of tensor memory."""
MMA_COLUMNS = 256
"""The most columns of one MMA. A wider tile is two halves, multiplied with one left operand."""
TMEM_COLUMNS = 512
"""Columns of tensor memory."""
USUAL_STAGES = 6
"""The usual tile has room for this number."""
USUAL_PROBLEM = Problem(4096, 4096, 4096)
"""The defaults of a config fit this, if its tile does: 16-bit operands and result."""
STEPS = (STEP_BYTES, 2 * STEP_BYTES)
"""Bytes of k that a step may have."""
NARROWEST_BOX = 32
"""Bytes of a row of the narrowest box that TMA swizzles."""
ACTIVATED_COLUMNS = 16
"""Columns that an activation sees at a time, of gate and up together: with 32, `erf` does not fit
into the registers."""
ISSUED_COLUMNS = 32
"""Columns of a chunk that fit into the registers beside an activation, where the epilogue's threads
have no others' registers: with 64, `erf` spills 8 bytes."""
SQUARE = 64
"""Rows and columns of what is mirrored at a time: of 16 bits, as wide as a box of TMA may be."""
PAIR = (2, 1)
"""The cluster of two CTAs that multiply together."""


class Registers(NamedTuple):
    """Registers per thread after reallocation."""

    issuing: int
    epilogue: int


@dataclasses.dataclass(frozen=True)
class BlackwellConfig(GemmConfig):
    """The settings of the Blackwell kernel.

    A cluster of (2, 1) is a pair of CTAs that issue one MMA together, on 256 rows; it is the only
    cluster there is. With `persistence="dynamic"` a cluster is launched for every tile, and those
    that run take over the tiles of those that wait (cluster launch control), so that `ctas` says
    nothing.

    >>> BlackwellConfig(tile=(128, 256), persistence="dynamic").cluster
    (2, 1)

    Attributes:
        accumulators: Accumulators in tensor memory. With two, a tile is stored while the next one
            is multiplied. A tile of more than 256 columns leaves room for one, whose halves are
            freed one after the other.
        specialised: Loads and MMAs are issued by warps of their own; else by one warp in turn, and
            a cluster computes only one tile.
        step_bytes: Bytes of k per step: 128, one swizzle atom, or 256, two of each operand under
            one barrier. It halves the instructions beside the MMAs of a small tile, and takes slots
            of twice the size.
        direct_store: The result goes from registers straight to global memory, without the store
            slots and TMA. Nothing clips it there: a ragged result is stored in whole tiles and cut.
    """

    LARGEST: ClassVar[tuple[int, int]] = (MMA_ROWS, TMEM_COLUMNS)

    tile: tuple[int, int] = (128, 256)
    stages: int = FITTING
    store_columns: int = FITTING
    cluster: tuple[int, int] = PAIR
    schedule: str | Schedule | OnlineSchedule = "hilbert"
    accumulators: int = 2
    specialised: bool = True
    step_bytes: int = STEP_BYTES
    direct_store: bool = False

    def reordered(self, schedule: str | Schedule | OnlineSchedule) -> Self:
        """See `GemmConfig`; clusters that are taken over are looked up in a table."""
        config = super().reordered(schedule)
        online = config.is_online and config.persistence == "dynamic"
        return dataclasses.replace(config, persistence="static") if online else config

    def _fit(self) -> None:
        """Finds the widest stores of a 16-bit result, and the most stages that go with them."""
        if self.store_columns is None:
            self._set("store_columns", max(math.gcd(self.tile[1], 64), STORE_COLUMNS[-1]))
        for stages in range(USUAL_STAGES, 0, -1) if self.stages is None else ():
            self._set("stages", stages)
            if self.shared_memory_bytes(USUAL_PROBLEM) <= Device.shared_memory:
                break

    def tile_k(self, problem: Problem) -> int:
        """See `GemmConfig`."""
        return self.step_bytes // problem.a_dtype.itemsize

    @property
    def atoms(self) -> int:
        """Swizzle atoms of each operand along k per step."""
        return self.step_bytes // STEP_BYTES

    @property
    def ctas_per_mma(self) -> int:
        """CTAs that issue an MMA together: 2 for a pair."""
        return self.cluster_size

    @property
    def registers(self) -> Registers | None:
        """Registers per thread of those that issue and of the epilogue; None leaves them alone.

        The epilogue gets the registers that loader and multiplier give up: for activations, and for
        the chunk that it reads ahead. Two warpgroups have the most that there is.
        """
        return Registers(120, 240) if self.specialised else None

    @property
    def loaded_columns(self) -> int:
        """See `GemmConfig`; each CTA of a pair loads half of them."""
        return self.tile[1] // self.ctas_per_mma

    def parts(self, problem: Problem) -> int:
        """MMAs of each atom: of each of the sums of a tile, or of each half of a wide one."""
        return max(problem.sums, -(-self.tile[1] // MMA_COLUMNS))

    def halves(self, problem: Problem) -> int:
        """Parts of an accumulator that are freed one after the other."""
        return self.parts(problem) // problem.sums

    def b_columns(self, problem: Problem) -> int:
        """Columns of each part that one CTA loads: half of them in a pair."""
        return self.tile[1] // self.parts(problem) // self.ctas_per_mma

    def read_columns(self, problem: Problem) -> int:
        """How many columns of the sums are read and finished at a time.

        Fewer with an activation, whose intermediate values need registers too, and the fewest
        where the threads of the epilogue load and multiply as well.
        """
        if problem.epilogue.activation is None:
            return self.store_columns
        return ACTIVATED_COLUMNS // (problem.sums if self.specialised else 2)

    def launched(self, problem: Problem, device: Device) -> int:
        """How many clusters the grid has; all but `workers` of them may never start."""
        if self.persistence == "static":
            return self.workers(problem, device)
        return self.tiles(problem)

    def shared_memory_bytes(self, problem: Problem) -> int:
        """Predicts the shared memory of a CTA; Mosaic aligns every buffer to 1,024 bytes."""
        depth = self.tile_k(problem) * self.stages
        # What is cut along k is stored by another kernel.
        stores = 0 if self.direct_store or self.cuts_all_tiles else self.store_slots
        stores *= self.tile[0] * self.store_columns * (2 if problem.symmetric else 1)
        buffers = (
            self.tile[0] * depth * problem.a_dtype.itemsize,
            self.parts(problem) * self.b_columns(problem) * depth * problem.b_dtype.itemsize,
            *(stores * dtype.itemsize for dtype in problem.stored_dtypes),
            8 * (2 * self.stages + 3 * self.accumulators + self.store_slots + 4),
            16 * 2,
        )
        return sum(-(-size // 1024) * 1024 for size in buffers)

    def refusals(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Returns every reason why this config cannot compute `problem` on `device`."""
        if device.compute_capability[0] != 10:
            return (f"the Blackwell kernel {device.lacks('10.x')}",)
        return (
            *problem_refusals(problem, device),
            *self._tile_refusals(problem),
            *self._mode_refusals(problem),
            *super().refusals(problem, device),
            *self._resource_refusals(problem, device),
        )

    def _malformed(self) -> Iterator[str]:
        if self.cluster not in ((1, 1), PAIR):
            yield f"cluster must be (1, 1) or, for a pair of CTAs, {PAIR}, got {self.cluster}"
            return
        yield from super()._malformed()

    def _impossible(self) -> Iterator[str]:
        yield from super()._impossible()
        whole = 16 * self.ctas_per_mma
        if self.tile[0] != MMA_ROWS:
            yield f"tile rows must be {MMA_ROWS}, got tile={self.tile}"
        elif self.tile[1] % whole:
            nearest = MMA_ROWS, max(round(self.tile[1] / whole), 1) * whole
            yield (
                f"tile columns must be a multiple of {whole}, got tile={self.tile}; the nearest is"
                f" {nearest}"
            )
        if self.accumulators not in (1, 2):
            yield f"accumulators must be 1 or 2, got {self.accumulators}"
        elif self.accumulators * self.tile[1] > TMEM_COLUMNS:
            yield f"accumulators must be 1 for tile={self.tile}, got {self.accumulators}"
        if self.step_bytes not in STEPS:
            yield f"step_bytes must be {' or '.join(map(str, STEPS))}, got {self.step_bytes}"
        if not self.specialised and self.persistence != "none":
            yield (
                "specialised=False computes one tile per cluster: persistence must be 'none', got"
                f" {self.persistence!r}"
            )
        if not self.specialised and self.split_k > 1:
            yield f"split_k needs specialised=True, got split_k={self.split_k}, specialised=False"
        if not 1 <= self.stages <= MAX_BARRIERS:
            yield f"stages must be from 1 to {MAX_BARRIERS}, got {self.stages}"
        if self.store_slots > MAX_BARRIERS:
            yield f"store_slots must be at most {MAX_BARRIERS}, got {self.store_slots}"

    def _tile_refusals(self, problem: Problem) -> Iterator[str]:
        atom = STEP_BYTES // problem.b_dtype.itemsize
        whole = self.parts(problem) * self.ctas_per_mma * (16 if problem.transpose_b else atom)
        if self.tile[1] % whole:
            yield (
                f"tile columns must be a multiple of {whole} for layout"
                f" {problem.layout}, cluster {self.cluster} and {problem.sums} right operands,"
                f" got tile={self.tile}"
            )
        columns = self.out_tile(problem)[1] // self.halves(problem)
        if columns % self.store_columns:
            yield (
                f"store_columns must divide the {columns} columns of a tile of the result,"
                f" got {self.store_columns}"
            )
        for dtype in problem.stored_dtypes:
            narrowest, widest = (bytes_ // dtype.itemsize for bytes_ in (NARROWEST_BOX, STEP_BYTES))
            if not self.direct_store and not narrowest <= self.store_columns <= widest:
                yield (
                    f"store_columns must be from {narrowest} to {widest} for {dtype}, got"
                    f" {self.store_columns}"
                )

    def _mode_refusals(self, problem: Problem) -> Iterator[str]:
        if self.persistence == "dynamic" and self.is_online:
            yield "persistence='dynamic' needs a schedule that is a table, got an online one"
        for asked, what in (
            (problem.epilogue.residual, "residual"),
            (problem.symmetric, "mirrored half"),
            (self.split_last is not None, "tiles of another kernel beside its own"),
        ):
            if self.direct_store and asked:
                yield f"direct_store has no {what}, which there is; direct_store=False would fit"
        if problem.symmetric and self.store_columns != SQUARE:
            yield (
                f"a symmetric result is stored in squares of {SQUARE}: store_columns must be"
                f" {SQUARE}, got {self.store_columns}"
            )

    def _resource_refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from self._memory_refusals(self.shared_memory_bytes(problem), device)
        activated = problem.epilogue.activation is not None and not self.specialised
        if activated and self.store_columns > ISSUED_COLUMNS:
            yield (
                "registers: with an activation and specialised=False, store_columns must be at"
                f" most {ISSUED_COLUMNS}, got {self.store_columns}"
            )


def _is_hoppers(problem: Problem) -> bool:
    """Whether a function has results or operands that only the Hopper kernel has slots for."""
    alone = len(problem.result_dtypes) == 1 and not problem.reductions
    return not alone or bool(problem.loaded_dtypes)


def problem_refusals(problem: Problem, device: Device) -> Iterator[str]:
    """Yields every reason why the Blackwell kernel cannot take a problem, whatever the config."""
    yield from element_types.refusals(problem, single=False, blocks=False)
    major, minor = device.compute_capability
    if problem.a_dtype == element_types.INT8 and (major, minor) != (10, 0):
        yield (
            "only compute capability 10.0 multiplies int8 in tensor memory,"
            f" {device.kind} has {major}.{minor}"
        )
    if problem.transpose_out:
        yield "the Blackwell kernel stores the result [m, n], got transpose_out=True"
    for asked, missing in (
        (problem.terms, f"takes no sum of products, got {problem.terms}"),
        (problem.in_groups, "takes no groups"),
        (
            problem.epilogue.program is not None and _is_hoppers(problem),
            "takes a function with one result and no operands of the product's shape",
        ),
        (problem.kept, f"stores all rows and columns, got kept={problem.kept}"),
    ):
        if asked:
            yield f"the Blackwell kernel {missing}"
    if problem.symmetric:
        yield from of_symmetry(problem)
    yield from of_sizes(problem, by_tma=True)
    for name, size, transposed, stored in (
        ("m", problem.m, problem.transpose_a, "a stored [k, m]"),
        ("n", problem.n, not problem.transpose_b, "b stored [k, n]"),
    ):
        atom = STEP_BYTES // problem.a_dtype.itemsize
        if transposed and (size % atom or problem.k % 8):
            yield (
                f"{stored} needs {name} to be a multiple of {atom} and k a multiple of 8, got"
                f" {name}={size}, k={problem.k}; stored with k last it needs neither"
            )
