"""Prints the PTX of a kernel that gathers rows of four H200, which need not be there.

`test_order_compiled.py` runs this in a process of its own: the compiler is told by the environment
to print, and keeps the architecture that it saw first.
"""

import jax
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import offline
from pallas_gemm.device import H200
from pallas_gemm.kernels.exchange import Exchange
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Problem

PROBLEM = Problem(4096, 1024, 1024)


def main() -> None:
    """Compiles it."""
    exchange = Exchange((("x", 4),), ("x",), gathers=True)
    mesh = Mesh(offline.devices("h200", 4), ("x",))
    plan = HopperPlan(PROBLEM, HopperConfig(tile=(128, 128)), H200, exchange=exchange)
    run = jax.shard_map(
        hopper.build(plan),
        mesh=mesh,
        in_specs=(P("x"), P()),
        out_specs=(P(), P()),
        check_vma=False,
    )
    operands = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in ((PROBLEM.a_shape, P("x")), (PROBLEM.b_shape, P()))
    )
    jax.jit(run).lower(*operands).compile()


if __name__ == "__main__":
    main()
