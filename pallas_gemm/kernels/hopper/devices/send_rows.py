"""How this device's rows of the left operand get to the others, while all multiply.

    warps 1 to 3 of the producer's warpgroup:    rows ──▶ registers ──▶ NVLink ──▶ `every`

Each device multiplies its own rows first, then those of the next device, and so on. So each sends
its rows to the device before it first, which needs them first. Rows that are sent together are a
*load*. Loads are claimed from a counter: whichever CTAs run send everything. If loads
were dealt, devices could wait for each other for ever where the kernel of a collective keeps a CTA
of ours from starting.

The receiver's producers wait until all loads of a device have arrived (`arrived`, one semaphore for
each), and then read them by TMA.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_gemm.kernels.exchange import Exchange, numbered, on_device
from pallas_gemm.kernels.ptx import copy_block, fences, words
from pallas_gemm.kernels.ptx.copy_block import BLOCK_BYTES
from pallas_gemm.kernels.traced import Scalar

LOAD = 16
"""Blocks that are claimed together."""


class Transfer(NamedTuple):
    """Rows in global memory, and what they are sent with.

    Attributes:
        own: This device's rows.
        every: The rows of all devices.
        arrived: A semaphore for each device: how many of its loads are here.
        claimed: For each device, how many loads to it have been claimed.
    """

    own: Any
    every: Any
    arrived: Any
    claimed: Any


def loads(size: int) -> int:
    """How many loads one device sends to another, if its rows have this size in bytes."""
    return -(-size // (BLOCK_BYTES * LOAD))


def loads_of(rows: Any) -> int:
    """How many loads the rows of a device are."""
    return loads(math.prod(rows.shape) * np.dtype(rows.dtype).itemsize)


def send(exchange: Exchange, rank: Scalar, transfer: Transfer) -> None:
    """Sends rows to all other devices, and then stores them here: what one warp of all does."""
    own, every, arrived, claimed = transfer
    block_size = BLOCK_BYTES // np.dtype(own.dtype).itemsize
    blocks, count = math.prod(own.shape) // block_size, loads_of(own)
    mine = own.reshape(blocks, block_size)

    for share in (*range(1, exchange.size), 0):
        # The device that computes these rows as its share number `share`.
        to = exchange.device(lax.rem(rank - share + exchange.size, jnp.int32(exchange.size)))
        there = every.reshape(exchange.size * blocks, block_size)
        if share:
            there = on_device(there, to)

        def send_load(load: Any, there: Any = there, to: Any = to, share: int = share) -> Any:
            @pl.loop(load * LOAD, lax.min((load + 1) * LOAD, jnp.int32(blocks)))
            def _send_block(block: Any) -> None:
                copy_block.copy(mine.at[block], there.at[rank * blocks + block])

            if share:
                fences.finish_stores()
                pl.semaphore_signal(arrived.at[rank], device_id=to, **numbered())
            return words.claim(claimed.at[share])

        def step(_: Any, load: Any, send_load: Any = send_load) -> Any:
            # One warp has no loop that ends by a condition.
            return lax.cond(load < count, send_load, lambda load: load, load)

        lax.fori_loop(0, count, step, words.claim(claimed.at[share]))
