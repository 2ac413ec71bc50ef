"""Fences between what threads and the asynchronous units read and write."""

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.ptx.operation import Operation, Ptx, nothing

BETWEEN_PROXIES = Ptx("fence.proxy.async;")
"""Between what threads store and TMA reads."""
MEET = Ptx("bar.warp.sync 0xffffffff;", convergent=True)


def finish_stores() -> None:
    """Lets the lane that signals speak for all: TMA of the receiver reads what they stored.

    Nothing simulated comes here.
    """
    BETWEEN_PROXIES()
    MEET()


def after_arrival() -> None:
    """Lets TMA read what others have stored and signalled. Nothing simulated comes here."""
    BETWEEN_PROXIES()


# What was read by ordinary loads is about to be overwritten by the asynchronous unit.


@Operation
def after_reading() -> None:
    """Lets an answer be overwritten that this role has read."""
    Ptx("fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;")()


@Operation
def before_asking() -> None:
    """Lets an answer be overwritten that all roles have read."""
    Ptx("fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;")()


after_reading.meaning(nothing)
before_asking.meaning(nothing)


@Operation
def after_loads() -> None:
    """Lets TMA overwrite all that this thread has loaded from shared memory."""
    Ptx("fence.proxy.async.shared::cta;")()


@after_loads.meaning
def _() -> None:
    plgpu.commit_smem()
