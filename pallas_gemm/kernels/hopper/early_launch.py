"""A kernel is launched before the one before it ends (programmatic dependent launch).

    begin    a CTA that has made its barriers waits until the kernel before has ended
    end      a CTA that has issued the last of its loads lets the next kernel be launched, where SMs
             are free or become so; of the kernel that joins summands, one that has waited

Every CTA waits before it touches global memory, also before a store: an array that it writes may be
one that the kernel before still reads. It waits whether or not it has work. The kernel after it
awaits this one alone: the one before this has ended, too, only if this one has awaited it. A CTA
that leaves has let the next kernel be launched.

It has no effect in a CUDA graph. XLA makes one of five or more kernels that follow each other. It
captures each of ours as a graph of its own, which begins when the one before has ended.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hopper.plan import HopperPlan


def begin(plan: HopperPlan) -> None:
    """Awaits the end of the kernel before, and all that it has written."""
    if plan.launched_early:
        plgpu.griddepcontrol_wait()


def end(plan: HopperPlan) -> None:
    """Lets the kernel after this one begin, when every CTA has come here."""
    if plan.launched_early:
        plgpu.griddepcontrol_launch_dependents()
