"""Costs that predictions count for the kernel of an architecture."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of an architecture that `prediction.py` asks for.

    Attributes:
        row_cycles: Cycles of TMA for each row of `STEP_BYTES` that a CTA loads.
        gpc_bytes_per_cycle: Bytes that the tiles of one GPC read from the L2. Bytes that several of
            them read at a time count once.
        fitted: Predictions were fitted to what was measured, so that they say something beside
            XLA's time. Others choose among configs only.
    """

    row_cycles: float
    gpc_bytes_per_cycle: float
    fitted: bool


HOPPER = Costs(row_cycles=1.3, gpc_bytes_per_cycle=490.0, fitted=True)

BLACKWELL = Costs(row_cycles=1.43, gpc_bytes_per_cycle=math.inf, fitted=False)
"""Each CTA of a pair loads half of the right operand: one CTA with tiles of 128 x 256 is then 6%
slower, as in JAX's tutorial on a B200. With Hopper's way to the L2, two CTAs would read no more
than a pair does, which by the article on a B200 is 1.5 times as much. Nobody has measured either.
"""
