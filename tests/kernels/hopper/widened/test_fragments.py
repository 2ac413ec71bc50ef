"""What a thread loads and widens, for all types of weights and both ways that they are stored."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.element_types import BITS, E2M1, INT4, INT8, UINT4
from pallas_gemm.kernels.ptx import fragments, row_order
from pallas_gemm.kernels.ptx import weights as weight_loads
from pallas_gemm.kernels.ptx.form import Form
from tests.kernels.hopper.widened import warpgroup_ptx
from tests.kernels.hopper.widened.warpgroup_ptx import THREADS, Warpgroup, registers, words

BF16, F16, F32 = (np.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float32))


def drawn(rng: np.random.Generator, kind: np.dtype, shape: tuple[int, int]) -> Any:
    """Weights as floats, and the bits of each."""
    bits = rng.integers(0, 1 << BITS[kind], shape).astype(np.uint8)
    if kind == INT8:
        return bits.view(np.int8).astype(np.float64), bits
    if kind in (INT4, UINT4):
        return (bits ^ 8).astype(np.float64) - 8 if kind == INT4 else bits.astype(np.float64), bits
    if kind == E2M1:
        return bits.view(E2M1).astype(np.float64), bits
    values = bits.view(kind).astype(np.float64)
    bits = np.where(np.isfinite(values), bits, 0).astype(np.uint8)
    return bits.view(kind).astype(np.float64), bits


def in_slot(lines: np.ndarray, width: int) -> np.ndarray:
    """Bytes as TMA writes them: panels so wide, swizzled."""
    panels = []
    for first in range(0, lines.shape[1], width):
        panel = lines[:, first : first + width].reshape(-1)
        at = np.arange(panel.size)
        found = np.zeros_like(panel)
        found[at ^ (at >> 3 & width - 16)] = panel
        panels.append(found)
    whole = np.concatenate(panels)
    return np.pad(whole, (0, -whole.size % 1024))


def drawn_zeros(
    rng: np.random.Generator, form: Form, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Zero points, [group, row], and the bytes of a slot of them."""
    lines, line, rows = form.zeros_of_part
    if form.zeros in BITS:
        values, bits = drawn(rng, form.zeros, shape)
        stored = bits[:, 0::2] | bits[:, 1::2] << 4 if BITS[form.zeros] == 4 else bits
    else:
        values = rng.uniform(0, 8, shape).astype(form.zeros)
        stored = values.view(np.uint8).reshape(len(values), -1)
    blocks = stored.reshape(len(stored), -1, line).swapaxes(0, 1)
    assert blocks.shape[0] * rows == form.all_rows
    padded = np.pad(blocks, ((0, 0), (0, lines - blocks.shape[1]), (0, 0)))
    return np.asarray(values, np.float64), padded.reshape(-1)


def exactly(form: Form, weights: Any, other: Any, scales: Any, zeros: Any) -> np.ndarray:
    """The sums of weights as they are widened, scaled and rounded; or of sums that are scaled."""
    if not form.group:
        return weights @ other.astype(np.float64).T
    each, less = (
        np.repeat(x.astype(np.float32).T, form.depth // len(x), 1) for x in (scales, zeros)
    )
    moved = weights.astype(np.float32) - less
    if not form.scales_sums:
        return (moved * each).astype(form.to).astype(np.float64) @ other.astype(np.float64).T
    parts = [np.split(values.astype(np.float64), len(scales), 1) for values in (moved, other)]
    sums = [left @ right.T for left, right in zip(*parts, strict=True)]
    return np.sum([x * y[:, None] for x, y in zip(sums, scales, strict=True)], 0)


def products(form: Form, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray, int]:
    """The sums of all consumers of a slot, the exact ones, and the ways of its worst load."""
    rng = np.random.default_rng(0)
    weights, bits = drawn(rng, form.kind, (form.all_rows, form.depth))
    other = rng.integers(-8, 9, (form.cols, form.depth)).astype(form.to)
    scales = rng.uniform(0.5, 2, (max(1, form.depth // (form.group or 1)), form.all_rows))
    scales = scales.astype(form.scales or np.float32)
    stored = bits if form.k_last else bits.T
    if form.bits == 4:
        stored = stored[:, 0::2] | stored[:, 1::2] << 4
    slots = [in_slot(np.ascontiguousarray(stored), form.line)]
    slots.append(in_slot(np.ascontiguousarray(other).view(np.uint8).reshape(form.cols, -1), 128))
    slots.append(scales.view(np.uint8).reshape(-1))
    zeros = np.zeros(scales.shape)
    if form.zeros is not None:
        zeros, in_blocks = drawn_zeros(rng, form, scales.shape)
        slots[-1] = np.pad(slots[-1], (0, -slots[-1].size % 128))
        slots.append(in_blocks)
    starts = np.cumsum([0, *(slot.size for slot in slots)])
    group = Warpgroup(np.concatenate(slots))
    warpgroup_ptx.emulated(monkeypatch, group)
    exact = exactly(form, weights, other, scales, zeros)
    found = np.zeros_like(exact)
    threads, shared = np.arange(THREADS), form.tops_of_line
    rows = 16 * (threads // 32) + threads % 32 // 4
    if not form.k_last:
        rows = shared * (16 * (threads // 32) + 2 * (threads % 32 // 4))
    for me in range(form.all_rows // form.rows):
        step = fragments.Step(
            form, [words(x) for x in starts[:-1]], weight_loads.places(form, words(me))
        )
        tops = form.rows // 64
        step.sums = [registers(form.cols // 8, 2, 2) for _ in range(tops)]
        step.of_group = [sums + np.nan for sums in step.sums]
        step.emit()
        for top, sums in enumerate(step.sums):
            for block, below, beside in np.ndindex(*sums.shape):
                row = me * form.rows + rows + form.row_offset(top, below)
                found[row, 8 * block + 2 * (threads % 4) + beside] = sums[block, below, beside]
    return found * form.part, exact, group.ways


@pytest.mark.parametrize(("k_last", "rows"), [(True, 64), (False, 64), (False, 128), (False, 256)])
@pytest.mark.parametrize("to", [BF16, F16])
@pytest.mark.parametrize("kind", BITS)
def test_weights_are_widened_exactly(
    kind: np.dtype, to: np.dtype, k_last: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = min(128, (128 if k_last else rows) * BITS[kind] // 8)
    form = Form(kind, to, k_last, rows=rows, all_rows=rows, cols=8, depth=128, line=line)
    found, exact, ways = products(form, monkeypatch)
    np.testing.assert_array_equal(found, exact)
    assert ways == 1


@pytest.mark.parametrize("k_last", [False, True])
@pytest.mark.parametrize(
    ("kind", "to", "scales"),
    [(INT4, BF16, BF16), (INT4, BF16, F32), (INT8, F16, F16), (E2M1, F16, BF16), (INT8, BF16, F16)],
)
@pytest.mark.parametrize(
    ("cols", "depth", "group"), [(16, 64, 32), (16, 64, 128), (8, 128, 64), (40, 64, 64)]
)
def test_each_group_has_its_scale(
    kind: np.dtype,
    to: np.dtype,
    scales: np.dtype,
    k_last: bool,
    cols: int,
    depth: int,
    group: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    along = depth if k_last else 256
    line = min(128, along * BITS[kind] // 8)
    form = Form(kind, to, k_last, 128, 256, cols, depth, line, group=group, scales=scales)
    assert form.scales_sums == (4 * cols <= min(depth, group))
    found, exact, ways = products(form, monkeypatch)
    np.testing.assert_array_equal(found, exact)
    assert ways == 1


@pytest.mark.parametrize("k_last", [False, True])
@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize(
    ("kind", "to", "zeros"),
    [
        (UINT4, BF16, UINT4),
        (INT4, F16, INT4),
        (INT8, BF16, INT8),
        (E2M1, F16, E2M1),
        (UINT4, BF16, F32),
        (INT8, F16, BF16),
        (np.dtype(jnp.float8_e4m3fn), BF16, np.dtype(jnp.float8_e4m3fn)),
    ],
)
def test_each_group_has_its_zero_point(
    kind: np.dtype, to: np.dtype, zeros: Any, sums: int, k_last: bool, monkeypatch: Any
) -> None:
    along = 128 if k_last else 64
    line = min(128, along * BITS[kind] // 8)
    scales = F32 if zeros == INT4 else BF16
    form = Form(kind, to, k_last, 128, 256, 8, 128, line, 64, scales, zeros, sums)
    found, exact, _ = products(form, monkeypatch)
    np.testing.assert_array_equal(found, exact)


def test_rows_of_a_warp_are_put_in_order() -> None:
    threads = np.arange(THREADS, dtype=np.uint32)
    row = 16 * (threads // 32) + 2 * (threads % 32 // 4)
    column = threads % 4
    found = Warpgroup(np.zeros(0, np.uint8)).run(
        row_order._EXCHANGE, 4 * row + column, 4 * (row + 1) + column, results=2
    )
    wanted = 16 * (threads // 32) + threads % 32 // 4
    np.testing.assert_array_equal(found[0], 4 * wanted + column)
    np.testing.assert_array_equal(found[1], 4 * (wanted + 8) + column)


@pytest.mark.parametrize("cols", [8, 16, 40])
def test_rows_of_a_warpgroup_are_put_in_order(cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form = Form(INT4, BF16, False, 128, 128, cols, 128, 64)
    group = Warpgroup(np.zeros(4 * form.scratch, np.uint8))
    warpgroup_ptx.emulated(monkeypatch, group)
    threads = np.arange(THREADS, dtype=np.uint32)
    first = 32 * (threads // 32) + 4 * (threads % 32 // 4)
    wanted = 16 * (threads // 32) + threads % 32 // 4
    sums = np.empty((2, cols // 8, 2, 2), object)
    for top, block, below, beside in np.ndindex(sums.shape):
        column = 8 * block + 2 * (threads % 4) + beside
        row = np.uint32(form.row_offset(top, below)) + first
        sums[top, block, below, beside] = Sum((1000 * row + column).astype(np.uint32))
    row_order.exchange(sums, words(0), form)
    for top, block, below, beside in np.ndindex(sums.shape):
        row, column = wanted + 64 * top + 8 * below, 8 * block + 2 * (threads % 4) + beside
        np.testing.assert_array_equal(sums[top, block, below, beside], 1000 * row + column)


class Sum(np.ndarray):
    """A register, which has a type as a value of the compiler does."""

    type = np.uint32

    def __new__(cls, values: np.ndarray) -> "Sum":
        return values.view(cls)
