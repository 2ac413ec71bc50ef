"""A product whose kernel exchanges rows with other devices: why not, and its function."""

from collections.abc import Callable, Iterator
from typing import Any

from pallas_gemm.device import Device
from pallas_gemm.kernels.exchange import Exchange
from pallas_gemm.kernels.hopper import kernel
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.devices import send_rows, sum_rows
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Problem


def refusals(problem: Problem, config: HopperConfig, exchange: Exchange) -> Iterator[str]:
    """Yields why a config's kernel cannot exchange rows."""
    rows, left = divmod(problem.m, exchange.size)
    if left or rows % (config.tile[0] * config.cluster[0]):
        yield f"the rows of {exchange.size} devices, {problem.m} in all, are no whole tiles"
    if config.mirrored:
        yield "the product is computed transposed"
    if config.split_k > 1:
        yield "tiles are cut along k"
    if not exchange.gathers:
        if rows * problem.n % sum_rows.BLOCK:
            yield f"{rows} x {problem.n} sums are not added up"
        return
    sent = rows * problem.k * problem.a_dtype.itemsize
    if problem.transpose_a or sent % send_rows.BLOCK_BYTES:
        yield f"{rows} x {problem.k} elements are not sent"
    if config.persistence != "static":
        yield "CTAs that are not yet running send nothing"


def build(
    problem: Problem, config: HopperConfig, device: Device, exchange: Exchange, out_dtype: Any
) -> Callable[..., Any]:
    """Returns the function of the operands: of the result, then of the rows that are gathered."""
    product = kernel.build(HopperPlan(problem, config, device, exchange))
    if exchange.gathers:
        return product
    return lambda *operands: [sum_rows.add_up(product(*operands), out_dtype, exchange.axes[0])]
