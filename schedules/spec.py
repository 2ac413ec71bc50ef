"""How an ORDER is named: "hilbert", "swizzle:12", "by_die:8:raster:cols".

The grammar, with fields in any order after the first:

    raster[:rows|:cols]
    swizzle[:GROUP][:rows|:cols][:serpentine|:straight]
    nested_swizzle[:FACTORS][:rows|:cols]
    log_swizzle[:LOG]
    hilbert
    clipped_hilbert
    by_die:DIES:ORDER
    triangle[:MxN]:ORDER

With `online_` before a raster or swizzle, a kernel computes the order instead
of reading it from a table.

GROUP, LOG and DIES are whole numbers, FACTORS are whole numbers with an x
between them. A part that is left out has the builder's default: "swizzle:12"
is serpentine, in bands of 12 rows. The name of a schedule made by a builder is
the text that gives it back.

A triangle is the part of an order that computes a symmetric result: the tiles
on and below the diagonal, of M by N elements. Without M and N, the grid is
that of a square.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from schedules import _check, _public
from schedules.dies import by_die
from schedules.hilbert import clipped_hilbert, hilbert
from schedules.online import OnlineSchedule, online_raster, online_swizzle
from schedules.raster import raster
from schedules.swizzle import log_swizzle, nested_swizzle, swizzle
from schedules.table import Schedule
from schedules.triangle import Triangle

ONLINE = "online_"
"""The beginning of the name of an order that is computed by arithmetic."""

BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "raster": raster,
        "swizzle": swizzle,
        "nested_swizzle": nested_swizzle,
        "log_swizzle": log_swizzle,
        "hilbert": hilbert,
        "clipped_hilbert": clipped_hilbert,
    }
)
"""All orders of a grid by their names. Each takes (rows, cols); the rest has defaults."""

ONLINE_BUILDERS: Mapping[str, Callable[..., OnlineSchedule]] = MappingProxyType(
    {"raster": online_raster, "swizzle": online_swizzle}
)
"""The orders that also exist as arithmetic."""


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Which fields may follow the name of an order: words, and at most one that has a number."""

    words: tuple[str, ...] = ()
    number: str | None = None


_ALONG = ("rows", "cols")
_NUMBER = "[0-9]{1,9}"
_GRAMMAR: Mapping[str, _Fields] = MappingProxyType(
    {
        "raster": _Fields(_ALONG),
        "swizzle": _Fields((*_ALONG, "serpentine", "straight"), "GROUP"),
        "nested_swizzle": _Fields(_ALONG, "FACTORS"),
        "log_swizzle": _Fields(number="LOG"),
        "hilbert": _Fields(),
        "clipped_hilbert": _Fields(),
    }
)


@dataclasses.dataclass(frozen=True)
class Builder:
    """The order that a text names: call it with (rows, cols) for its table.

    Attributes:
        table: Makes the order of a grid as a table.
        online: Makes it as arithmetic; None where the text asks for a table.
    """

    table: Callable[[int, int], Schedule]
    online: Callable[[int, int], OnlineSchedule] | None = None

    @property
    def is_online(self) -> bool:
        """Whether the text asks for arithmetic."""
        return self.online is not None

    def __call__(self, rows: int, cols: int) -> Schedule:
        """Returns the table."""
        return self.table(rows, cols)


@functools.lru_cache(maxsize=16, typed=True)
def build(spec: str, rows: int, cols: int) -> Schedule:
    """Returns the order that `spec` names, on a grid, as a table.

    >>> build("swizzle:3:straight", 8, 8)
    Schedule(grid=(8, 8), name='swizzle:3:straight')

    Args:
        spec: The name of an order with its options; the module's docstring has the grammar.
        rows: Rows of tiles.
        cols: Columns of tiles.

    Raises:
        ValueError: `spec` names no order, or the grid is not legal.
    """
    return parse(spec)(rows, cols)


@functools.lru_cache(maxsize=256)
def resolve(spec: str, rows: int, cols: int) -> Schedule | OnlineSchedule:
    """Returns the order that `spec` names, on a grid, as a table or as arithmetic.

    >>> resolve("online_swizzle:2", 4, 4).is_online
    True

    Raises:
        ValueError: As for `build`.
    """
    builder = parse(spec)
    return (builder.online or builder.table)(rows, cols)


def is_table_of_all(spec: str, rows: int, cols: int) -> bool:
    """Whether `spec` names a table of all tiles of a grid, which takes long to make.

    False of arithmetic, and where a name has others in it: only the order itself tells then.

    >>> is_table_of_all("swizzle:8", 4, 4), is_table_of_all("triangle:hilbert", 4, 4)
    (True, False)

    Raises:
        ValueError: As for `build`.
    """
    is_whole = not parse(spec).is_online and spec.partition(":")[0] in BUILDERS
    if is_whole:
        _check.grid_size(rows, cols)
    return is_whole


@functools.lru_cache(maxsize=256, typed=True)
def parse(spec: str) -> Builder:
    """Returns the builder that `spec` names: call it with (rows, cols).

    >>> parse("swizzle:2")(4, 4).name
    'swizzle:2'

    Args:
        spec: The name of an order with its options; the module's docstring has the grammar.

    Raises:
        ValueError: `spec` names no order, or has an option that is not legal.
    """
    if not isinstance(spec, str) or len(spec) > 200:
        raise ValueError(f"schedule must be a short text such as 'swizzle:8', got {spec!r:.200}")
    head, _, rest = spec.partition(":")
    if head == "by_die":
        return _parse_by_die(spec, rest)
    if head == "triangle":
        return _parse_triangle(spec, rest)
    if head.startswith(ONLINE):
        name = spec.removeprefix(ONLINE)
        table = parse(name).table
        online = ONLINE_BUILDERS[_known(name, ONLINE_BUILDERS)]
        return Builder(table, functools.partial(online, **_options(name)))
    return _tried(spec, functools.partial(BUILDERS[_known(spec, BUILDERS)], **_options(spec)))


def _known(spec: str, orders: Mapping[str, object]) -> str:
    head = spec.partition(":")[0]
    if head in orders:
        return head
    close = difflib.get_close_matches(head, orders, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    others = ["by_die:DIES:ORDER", "triangle:ORDER"] if orders is BUILDERS else []
    names = ", ".join([*orders, *others])
    kind = "order" if orders is BUILDERS else "on-line order"
    raise ValueError(f"schedule {spec!r}: there is no {kind} {head!r}; {hint}legal: {names}")


def _options(spec: str) -> dict[str, object]:
    """Returns the keyword arguments that the fields after the name stand for."""
    head, *fields = spec.split(":")
    grammar = _GRAMMAR[head]
    options: dict[str, object] = {}
    for field in fields:
        key, value = _option(spec, grammar, field)
        if key in options:
            raise ValueError(f"schedule {spec!r}: {field!r} sets {key} a second time")
        options[key] = value
    return options


def _option(spec: str, grammar: _Fields, field: str) -> tuple[str, object]:
    if field in grammar.words:
        return ("along", field) if field in _ALONG else ("serpentine", field == "serpentine")
    if grammar.number == "FACTORS" and re.fullmatch(f"{_NUMBER}(x{_NUMBER})*", field):
        return "factors", tuple(map(int, field.split("x")))
    if grammar.number in ("GROUP", "LOG") and re.fullmatch(_NUMBER, field):
        return grammar.number.lower(), int(field)
    legal = ", ".join([*([grammar.number] if grammar.number else []), *grammar.words])
    raise ValueError(f"schedule {spec!r}: {field!r} is no option; legal: {legal or 'none'}")


def _parse_by_die(spec: str, rest: str) -> Builder:
    dies, _, inner = rest.partition(":")
    if not re.fullmatch(_NUMBER, dies) or not inner:
        raise ValueError(f"schedule {spec!r}: must be by_die:DIES:ORDER, as in by_die:8:hilbert")
    return _tried(spec, functools.partial(_by_die_of, parse(inner).table, int(dies)))


def _by_die_of(order: Callable[[int, int], Schedule], dies: int, rows: int, cols: int) -> Schedule:
    return by_die(order(rows, cols), dies)


def _parse_triangle(spec: str, rest: str) -> Builder:
    tile = re.match(f"({_NUMBER})x({_NUMBER}):", rest)
    inner = rest[tile.end() :] if tile else rest
    if not inner:
        raise ValueError(
            f"schedule {spec!r}: must be triangle:ORDER, as in triangle:hilbert, or with the sizes"
            " of a tile, as in triangle:128x256:hilbert"
        )
    sizes = tuple(map(int, tile.groups())) if tile else None
    return _tried(spec, functools.partial(_triangle_of, spec, parse(inner).table, sizes))


def _triangle_of(
    spec: str,
    order: Callable[[int, int], Schedule],
    tile: tuple[int, ...] | None,
    rows: int,
    cols: int,
) -> Schedule:
    tall, wide = tile or (cols, rows)
    inside = order(rows, cols).within(Triangle(rows, (tall, wide)))
    return dataclasses.replace(inside, name=spec)


def _tried(spec: str, table: Callable[[int, int], Schedule]) -> Builder:
    """Returns the builder, or raises: the smallest grid shows an illegal option at once."""
    try:
        table(1, 1)
    except ValueError as error:
        raise ValueError(f"schedule {spec!r}: {error}") from None
    return Builder(table)


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals(), "ONLINE", "BUILDERS", "ONLINE_BUILDERS")
