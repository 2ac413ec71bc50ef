"""The order in which the output tiles of a matrix multiply are visited, in pure NumPy.

A builder such as `hilbert(rows, cols)` makes a `Schedule`: a table that can be read, drawn
(`schedules.draw`), judged (`schedules.model`), dealt out to workers, and given to a kernel. The
`online_` builders make the same orders as arithmetic. `python -m schedules --help` does all of it
from the command line.

>>> from schedules import hilbert
>>> hilbert(2, 2).order.tolist()
[[0, 0], [1, 0], [1, 1], [0, 1]]
>>> hilbert(2, 2).deal(workers=3).tolist()
[[0, 1], [65536, -1], [65537, -1]]
"""

from schedules import _public
from schedules.dies import by_die as by_die
from schedules.hilbert import clipped_hilbert as clipped_hilbert
from schedules.hilbert import hilbert as hilbert
from schedules.online import OnlineSchedule as OnlineSchedule
from schedules.online import online_raster as online_raster
from schedules.online import online_swizzle as online_swizzle
from schedules.pieces import Pieces as Pieces
from schedules.pieces import Split as Split
from schedules.pieces import split_k as split_k
from schedules.pieces import unsplit as unsplit
from schedules.raster import raster as raster
from schedules.spec import BUILDERS as BUILDERS
from schedules.spec import ONLINE_BUILDERS as ONLINE_BUILDERS
from schedules.spec import build as build
from schedules.spec import parse as parse
from schedules.spec import resolve as resolve
from schedules.swizzle import log_swizzle as log_swizzle
from schedules.swizzle import nested_swizzle as nested_swizzle
from schedules.swizzle import swizzle as swizzle
from schedules.table import PADDING as PADDING
from schedules.table import Schedule as Schedule
from schedules.triangle import Triangle as Triangle


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals())
