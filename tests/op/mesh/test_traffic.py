"""What collectives bring to each device, read from lines as XLA writes them."""

import pytest

from pallas_gemm.op.mesh import traffic

TEXT = """
ENTRY %main {
  %all-gather.3 = bf16[1024,256]{1,0} all-gather(%p), replica_groups=mesh['a'=2,'b'=4] {'b'}, x
  %reduce.1 = f32[16,8]{1,0} reduce-scatter(%p), replica_groups=mesh['a'=2], device_ids=(0,1) {'a'}
  %all-to-all = (f32[2,3]{1,0}, f32[2,3]{1,0}) all-to-all(%p, %q), replica_groups={{0,1},{2,3}}
  %permute.5 = s8[7]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
  %all-reduce-start.1 = ((bf16[3,2]{1,0}), bf16[3,2]{1,0}) all-reduce-start(%p), \
replica_groups=[2,4]<=[8]
  ROOT %all-reduce-done.1 = bf16[3,2]{1,0} all-reduce-done(%all-reduce-start.1), x
}
"""


def test_each_collective_counts_once() -> None:
    gathered = 1024 * 256 * 2 * 3 / 4
    scattered = 16 * 8 * 4
    exchanged = 2 * 2 * 3 * 4 / 2
    permuted = 7
    reduced = 3 * 2 * 2 * 2 * 3 / 4
    assert traffic.received(TEXT) == gathered + scattered + exchanged + permuted + reduced


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        *(("pred", 1), ("s8", 1), ("f8e4m3fn", 1), ("bf16", 2), ("f16", 2)),
        *(("f32", 4), ("s32", 4), ("u32", 4), ("f64", 8)),
    ],
)
def test_each_type_has_its_bytes(dtype: str, width: int) -> None:
    line = f"  %own.1 = {dtype}[7,3]{{1,0}} collective-permute(%p), source_target_pairs={{{{0,1}}}}"
    assert traffic.received(line) == 21 * width
