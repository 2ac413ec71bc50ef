"""How what a warpgroup has in registers is multiplied by a slot of the other operand."""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils

from pallas_gemm.kernels.ptx import widen
from pallas_gemm.kernels.ptx.form import Form
from pallas_gemm.kernels.ptx.sums import added, values_of
from pallas_gemm.kernels.ptx.widen import Register
from pallas_gemm.kernels.smem import ATOM_BYTES

IN_FLIGHT = 1
"""Groups of WGMMAs while the next weights are widened."""
NAMES = {widen.BF16: "bf16", widen.F16: "f16", widen.F32: "tf32"}

Fragments = Sequence[Sequence[Sequence[Register]]]
"""The left operand of a batch: [contracted elements of a WGMMA, 64 rows, word]."""


class Multiplier:
    """Multiplies by WGMMA: batches are in flight while the next one is widened."""

    def __init__(self, form: Form, x: Register) -> None:
        self._form, self._x = form, x

    def multiply(self, sums: list[Any], left: Fragments, at: int, begins: bool) -> None:
        """Multiplies a batch.

        Args:
            sums: The registers of each 64 rows, which are replaced.
            left: Its left operand.
            at: Its first contracted element.
            begins: Whether sums have no value yet.
        """
        depth = self._form.wgmma_depth
        parts = [self._describe(at + part * depth) for part in range(len(left))]
        utils.nvvm.wgmma_fence_aligned()
        for part, (own, descriptor) in enumerate(zip(left, parts, strict=True)):
            for top, words in enumerate(own):
                sums[top] = wgmma(
                    sums[top], words, descriptor, self._form, begins=begins and part == 0
                )
        utils.nvvm.wgmma_commit_group_sync_aligned()
        utils.nvvm.wgmma_wait_group_sync_aligned(IN_FLIGHT)

    def finish(self) -> None:
        """Waits until sums can be read."""
        utils.nvvm.wgmma_wait_group_sync_aligned(0)

    def _describe(self, at: int) -> Any:
        """The descriptor of the contracted elements of a WGMMA, of the other operand."""
        panel, within = divmod(at * self._form.to.itemsize, ATOM_BYTES)
        first = panel * self._form.cols * ATOM_BYTES + within
        # Atoms of 8 columns follow each other; the last bit asks for their swizzle.
        text = (
            f"{{ .reg .b32 low, high; and.b32 low, $1, 0x3ffff; shr.b32 low, low, 4;"
            f" add.u32 low, low, {(first >> 4) + (1 << 16)};"
            f" mov.b32 high, {1 << 30 | 8 * ATOM_BYTES >> 4}; mov.b64 $0, {{low, high}}; }}"
        )
        return utils.inline_ptx(text, self._x, result_types=utils.ir.IntegerType.get_signless(64))


def wgmma(
    sums: Any, words: Sequence[Register], descriptor: Any, form: Form, *, begins: bool
) -> Any:
    """Issues a WGMMA whose left operand is in registers; returns the registers that it adds to.

    Args:
        sums: These registers.
        words: The left operand.
        descriptor: Where the other operand is.
        form: How it lies there.
        begins: Whether it does not add, but writes them.
    """
    values = values_of(sums)
    count = len(values)
    names = ",".join(f"${i}" for i in range(count))
    left = ",".join(f"${2 * count + i}" for i in range(4))
    kind = NAMES[form.to]
    # The last number says that the other operand is not transposed: TF32 never is.
    signs = "1, 1" if form.to == widen.F32 else "1, 1, 0"
    text = (
        f"{{ .reg .pred adds; setp.ne.b32 adds, {int(not begins)}, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{form.cols}k{form.wgmma_depth}.f32.{kind}.{kind}"
        f" {{{names}}}, {{{left}}}, ${2 * count + 4}, adds, {signs}; }}"
    )
    if begins:
        values = [utils.llvm.mlir_undef(x.type) for x in values]
    given, constraints = [*values, *words, descriptor], [*map(str, range(count)), *"rrrrl"]
    return added(sums, text, given, constraints)
