"""Where planning decides otherwise as one size grows: for `swept.txt`."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pallas_gemm import BlackwellConfig, HopperConfig
from pallas_gemm.call import Numerics, Options
from pallas_gemm.device import B200, H200
from pallas_gemm.planning import bands, dispatch, heuristics, numerics
from pallas_gemm.planning import scheme as schemes
from pallas_gemm.planning.by_xla import xla_faster
from pallas_gemm.planning.candidates import blackwell, cuts, hopper, partial, widened
from pallas_gemm.problem import Epilogue, Problem
from tests.planning.products import (
    BF16,
    BYTES,
    E4M3,
    F32,
    HIGHEST,
    HOPPER,
    PRESET,
    SINGLES,
    SWIGLU,
    WEIGHTS,
    asked,
)

EIGHT = {"k": 16384, "a_dtype": E4M3, "b_dtype": E4M3}
BY_64, FAR = range(64, 20000, 64), range(1024, 2**17, 512)


class Swept(NamedTuple):
    """What is asked of each size, and the sizes."""

    said: Callable[[int], Any]
    sizes: Iterable[int]


def intervals(own: Swept) -> list[str]:
    """Returns what is said of sizes, those that follow each other with the same answer in a line.

    Answers that alternate, as of rows that are aligned or not, are lines for a few sizes each.
    """
    found = [(size, str(own.said(size))) for size in own.sizes]
    lines = []
    for said, sizes in itertools.groupby(found, key=lambda pair: pair[1]):
        first, *others = (size for size, _ in sizes)
        lines.append(f"{first} to {others[-1]}: {said}" if others else f"{first}: {said}")
    return lines


def _rule(size: str, **fields: Any) -> Callable[[int], str]:
    """Returns the function that says which rule leaves a product of a size to XLA."""
    problem = Problem(**{"m": 4096, "n": 4096, "k": 4096} | fields)

    def said(value: int) -> str:
        own = dataclasses.replace(problem, **{size: value})
        return next((rule.__name__ for rule in xla_faster.RULES if rule(own)), "the kernel")

    return said


def _of(function: Callable[..., Any], size: str, *rest: Any, **fields: Any) -> Callable[[int], Any]:
    """Returns the function that asks another one of a problem of a size."""
    problem = Problem(**{"m": 1024, "n": 1024, "k": 4096} | fields)

    def said(value: int) -> Any:
        found = function(dataclasses.replace(problem, **{size: value}), *rest)
        return list(found) if hasattr(found, "__next__") else found

    return said


def _parts(size: str, n: int = 512, k: int = 8192, dtype: Any = BF16, **rest: Any) -> Any:
    asked = Options(numerics=Numerics("rows"))
    return lambda value: (
        numerics.resolved(
            asked, **{"n": n, "k": k, "dtype": dtype, "longest": 0} | rest | {size: value}
        ).parts
    )


def _scheme(layout: str = "NT", **fields: Any) -> Callable[[int], str]:
    def said(k: int) -> str:
        own = asked((512, 512, k), layout, types=SINGLES, **fields)
        scheme = schemes.of_call(own.call, own.signature)
        return f"{scheme}, sums of {scheme.longest_sum}" if scheme else "None"

    return said


def _decided(place: int, *sizes: int, layout: str = "NT", **fields: Any) -> Callable[[int], str]:
    def said(value: int) -> str:
        own = asked((*sizes[:place], value, *sizes[place + 1 :]), layout, **fields)
        return dispatch.decide(own.resolved, own.signature).implementation

    return said


def _order(problem: Problem, config: HopperConfig) -> str:
    return bands.order(problem, config, H200)


def _ctas(problem: Problem, config: HopperConfig) -> int:
    return heuristics.balanced_ctas(problem, config, H200)


def _best(size: str, **fields: Any) -> Callable[[int], str]:
    """Returns the function that says which tile a product of a size has, and how it is stored."""
    problem = Problem(**{"m": 4096, "n": 4096, "k": 1024, "transpose_b": True} | fields)

    def said(value: int) -> str:
        best = heuristics.best(dataclasses.replace(problem, **{size: value}), H200, HOPPER)
        if not isinstance(best, HopperConfig):
            return "none"
        names = ("stages", "store_columns", "store_slots", "late_store", "pingpong", "mirrored")
        own = ", ".join(f"{name}={getattr(best, name)}" for name in names)
        return f"{best.tile[0]} x {best.tile[1]}, {own}, cut by {best.split_k}"

    return said


def _last(problem: Problem, tile: tuple[int, int]) -> Any:
    return list(hopper._last_ways(HopperConfig(tile), problem, H200))


NT: Mapping[str, Any] = {"transpose_b": True}
TN: Mapping[str, Any] = {"transpose_a": True}
LARGE_TILE, TURNS = HopperConfig((128, 256), ctas=132), HopperConfig((128, 128), pingpong=True)

SWEPT: Mapping[str, Swept] = {
    # Rules that leave products to XLA.
    "XLA by rows, stored by columns": Swept(_rule("m", **TN, n=2176), range(8, 1200, 8)),
    "XLA by rows of few columns": Swept(_rule("m", **TN, n=2048, k=4096), range(8, 1200, 8)),
    "XLA by rows, of bytes stored by columns": Swept(
        _rule("m", **TN, n=4096, a_dtype=E4M3, b_dtype=E4M3), range(16, 1200, 16)
    ),
    "XLA by columns": Swept(_rule("n"), range(120, 1100, 4)),
    "XLA by columns stored as rows": Swept(_rule("n", **NT), range(126, 140)),
    "XLA by columns of few rows": Swept(_rule("n", m=128), range(1024, 1200, 4)),
    "XLA by columns of more rows": Swept(_rule("n", m=129), range(1024, 1200, 4)),
    "XLA by columns, wide": Swept(_rule("n", m=8192, out_dtype=F32), range(1984, 2256, 16)),
    "XLA by k": Swept(_rule("k"), BY_64),
    "XLA by k, as it is read": Swept(_rule("k", **NT, n=2176), BY_64),
    "XLA by results with a short k": Swept(_rule("n", k=512, m=8192), range(1024, 4096, 64)),
    "XLA by results as they are read": Swept(_rule("n", k=576, **NT), range(1024, 4200, 64)),
    "XLA by results with a k of 576": Swept(_rule("n", k=576, **TN), range(1024, 4200, 64)),
    "XLA by rows, tiny": Swept(_rule("m", n=512, k=512, **NT), range(1, 40)),
    "XLA by columns, tiny": Swept(_rule("n", m=8, k=512, **NT), range(128, 1024, 16)),
    "XLA by k, tiny": Swept(_rule("k", m=8, n=512, **NT), range(64, 2048, 16)),
    "XLA by columns of a vector": Swept(_rule("n", m=1, k=4000, **NT), range(1000, 2600, 4)),
    "XLA by matrices": Swept(_rule("batch", m=128, n=128, k=128), range(32750, 32780)),
    "XLA by the size of small matrices": Swept(
        _rule("k", m=128, n=128, batch=40000), range(16, 256, 16)
    ),
    # Partial sums, and how k is cut.
    "parts by columns": Swept(_parts("n"), range(2100)),
    "parts by k": Swept(_parts("k"), range(64, 8192, 32)),
    "parts by k of bytes": Swept(_parts("k", dtype=E4M3), range(128, 16384, 128)),
    "parts by k, each so long": Swept(_parts("k", n=4096, longest=4096), range(2048, 20000, 64)),
    "sums by k": Swept(_of(partial.fewest_sums, "k", H200, m=512, n=512, out_dtype=F32), BY_64),
    "sums by rows": Swept(_of(partial.fewest_sums, "m", H200, n=512, out_dtype=F32), BY_64),
    "sums by columns": Swept(_of(partial.fewest_sums, "n", H200, m=512, out_dtype=F32), BY_64),
    "sums that are no longer than 256": Swept(
        _of(partial.fewest_sums, "k", H200, longest_sum=256), range(64, 2048, 64)
    ),
    "sums of 16 bits by k": Swept(_of(partial.fewest_sums, "k", H200, m=512, n=512), BY_64),
    "sums of groups by k": Swept(
        _of(partial.fewest_sums, "k", H200, m=512, n=512, out_dtype=F32, groups=4), BY_64
    ),
    "sums of 8 bits by k": Swept(_of(partial.fewest_sums, "k", H200, **EIGHT | {"m": 16}), BY_64),
    "sums of 8 bits by rows": Swept(_of(partial.fewest_sums, "m", H200, **EIGHT), range(1, 200)),
    "sums of 8 bits by columns": Swept(_of(partial.fewest_sums, "n", H200, **EIGHT), range(1, 200)),
    "sums of 8 bits by rows of 4 groups": Swept(
        _of(partial.fewest_sums, "m", H200, groups=4, **EIGHT), range(1, 700)
    ),
    "cut by rows": Swept(_of(cuts.may_be_cut, "m", H200, n=2880), range(1, 100)),
    "cut by columns of few rows": Swept(_of(cuts.may_be_cut, "n", H200, m=40), range(64, 4000, 16)),
    "cut by matrices of few rows": Swept(
        _of(cuts.may_be_cut, "batch", H200, m=40, n=256), range(1, 30)
    ),
    "promised pieces by parts": Swept(_of(cuts.promised_pieces, "parts", H200), range(1, 40)),
    "promised pieces by rows": Swept(
        _of(cuts.promised_pieces, "m", H200, parts=4), range(128, 8192, 128)
    ),
    "pieces by k": Swept(
        lambda k: list(cuts.pieces(LARGE_TILE, Problem(512, 768, k), H200)), range(512, 20000, 512)
    ),
    "pieces by columns": Swept(
        lambda n: list(cuts.pieces(LARGE_TILE, Problem(1024, n, 16384), H200)),
        range(256, 8192, 256),
    ),
    "pieces of the last tiles by k": Swept(
        _of(_last, "k", (128, 128), m=2560, n=2560), range(512, 20000, 512)
    ),
    "pieces of the last tiles by columns": Swept(
        _of(_last, "n", (128, 128), m=2560, k=16384), range(128, 6000, 128)
    ),
    # Orders and CTAs.
    "order by rows": Swept(_of(_order, "m", LARGE_TILE, n=8192), range(128, 8192, 128)),
    "order by columns": Swept(_of(_order, "n", LARGE_TILE, m=2048), range(256, 16384, 256)),
    "order by k": Swept(_of(_order, "k", LARGE_TILE, m=8192, n=8192), FAR),
    "order of few tiles by k": Swept(_of(_order, "k", LARGE_TILE, m=4096, n=4096), FAR),
    # At 2048, the L2 holds both operands and not a row more.
    "order of what the L2 holds by k": Swept(
        _of(_order, "k", LARGE_TILE, m=1280, n=4096), range(2040, 2056)
    ),
    "order in turns by rows": Swept(_of(_order, "m", TURNS, n=1024), range(128, 4096, 128)),
    "order of groups by groups": Swept(_of(_order, "groups", LARGE_TILE, m=16384), range(1, 80)),
    "order of high tiles by rows": Swept(
        _of(_order, "m", HopperConfig((256, 192), late_store=False), n=4096), range(256, 9000, 256)
    ),
    "CTAs by tiles": Swept(
        _of(_ctas, "m", HopperConfig((128, 128)), n=128), range(128 * 120, 128 * 160, 128)
    ),
    "CTAs by k": Swept(_of(_ctas, "k", LARGE_TILE, m=8192, n=8192), range(16, 300, 16)),
    "CTAs by rows, in turns": Swept(_of(_ctas, "m", TURNS, n=2048), range(128, 4096, 128)),
    # Candidates.
    "columns for weights of few bits": Swept(_of(widened._columns, "m", H200), range(1, 1200)),
    "columns for weights of few bits, of groups": Swept(
        _of(widened._columns_of_groups, "m", groups=8), range(1, 2000, 7)
    ),
    "rows of a large group": Swept(_of(widened._groups, "m", groups=8), range(1, 400, 3)),
    "persistence by k": Swept(
        lambda k: blackwell._persistence(Problem(8192, 8192, k), BlackwellConfig(), B200),
        range(64, 2048, 2),
    ),
    "persistence by tiles": Swept(
        lambda m: blackwell._persistence(Problem(m, 4096, 4096), BlackwellConfig(), B200),
        range(256, 8192, 256),
    ),
    "tiles by k": Swept(_best("k"), (64, 128, 192, 256, 448, 504, 512, 768, 4096)),
    "tiles with a residual by k": Swept(
        _best("k", epilogue=Epilogue(residual=True)), (64, 128, 192, 512, 960, 1024, 4096)
    ),
    "tiles of float32 results by k": Swept(
        _best("k", out_dtype=F32), (64, 128, 192, 512, 960, 1024, 4096)
    ),
    "tiles of symmetric results by k": Swept(
        _best("k", symmetric="gram"), (64, 128, 192, 512, 960, 1024, 4096)
    ),
    "tiles by rows": Swept(_best("m"), (1, 16, 17, 64, 65, 96, 128, 192, 256, 448, 512, 1000)),
    "tiles by columns": Swept(_best("n"), (8, 16, 24, 32, 64, 72, 96, 128, 192, 256, 448, 520)),
    "tiles of groups by groups": Swept(
        _best("groups", m=8192, n=2048), (1, 2, 16, 32, 63, 64, 65, 128)
    ),
    # What multiplies.
    "HIGHEST by k": Swept(_scheme(precision=HIGHEST), range(64, 4096, 64)),
    "TF32 X3 by k": Swept(_scheme(precision=PRESET.TF32_TF32_F32_X3), range(64, 4096, 64)),
    "weights by rows": Swept(_decided(0, 1, 14336, 4096, **WEIGHTS), range(512, 8192, 512)),
    "a square by rows": Swept(_decided(0, 1, 4096, 4096), range(64, 1024, 64)),
    "bytes by rows": Swept(_decided(0, 1, 4096, 4096, types=BYTES), range(64, 1024, 64)),
    "a gated product by columns": Swept(
        _decided(1, 256, 1, 4096, epilogue=SWIGLU), range(32, 512, 32)
    ),
}
