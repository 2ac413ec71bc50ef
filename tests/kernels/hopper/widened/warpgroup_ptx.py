"""Runs the PTX of one warpgroup's fragments as 128 threads do, in NumPy, and its WGMMAs.

It knows what `kernels/ptx/fragments.py` emits, and refuses all else.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.ptx import fragments, multiply, row_order, small, sums, weights, widen
from pallas_gemm.kernels.ptx.form import Form

THREADS = 128
Words = np.ndarray
"""A register of each thread."""
TYPES: dict[str, Any] = {"bf16": np.dtype(jnp.bfloat16), "f16": np.float16}
BANKS = 32


def words(value: int) -> Words:
    """A register that all threads have."""
    return np.full(THREADS, value & 0xFFFFFFFF, np.uint32)


def _permuted(a: Words, b: Words, chosen: Words) -> Words:
    both, found = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), words(0)
    for place in range(4):
        which = chosen >> (4 * place) & 0xF
        assert (which < 8).all()
        byte = both >> (8 * which).astype(np.uint64) & np.uint64(0xFF)
        found |= byte.astype(np.uint32) << (8 * place)
    return found


def _logic(a: Words, b: Words, c: Words, table: Words) -> Words:
    found = words(0)
    for row in range(8):
        if table[0] >> row & 1:
            own = [x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
            found |= own[0] & own[1] & own[2]
    return found


def _halves(word: Words, kind: Any) -> list[np.ndarray]:
    return [(word >> shift & 0xFFFF).astype(np.uint16).view(kind) for shift in (0, 16)]


def _joined(halves: Sequence[Any], kind: Any) -> Words:
    low, high = (np.asarray(x).astype(kind).view(np.uint16).astype(np.uint32) for x in halves)
    return low | high << 16


def _by_halves(function: Callable[..., Any], kind: Any) -> Callable[[Words, Words], Words]:
    def run(x: Words, y: Words) -> Words:
        pairs = zip(_halves(x, kind), _halves(y, kind), strict=True)
        return _joined(
            [function(p.astype(np.float32), q.astype(np.float32)) for p, q in pairs], kind
        )

    return run


def _sum_of_product(kind: Any) -> Callable[[Words, Words, Words], Words]:
    def run(x: Words, y: Words, z: Words) -> Words:
        each = ([half.astype(np.float64) for half in _halves(word, kind)] for word in (x, y, z))
        return _joined([p * q + r for p, q, r in zip(*each, strict=True)], kind)

    return run


def _from_8_bits(kind: Any) -> Callable[[Words], Words]:
    def run(two: Words) -> Words:
        both = [(two >> shift & 0xFF).astype(np.uint8).view(kind) for shift in (0, 8)]
        return _joined([x.astype(np.float32) for x in both], np.float16)

    return run


def _to(kind: Any) -> Callable[[Words, Words], Words]:
    return lambda high, low: _joined([low.view(np.float32), high.view(np.float32)], kind)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "cvt.u32.u16": lambda a: a,
    "cvt.u16.u32": lambda a: a & 0xFFFF,
    "shr.b32": np.right_shift,
    "shl.b32": np.left_shift,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "add.u32": np.add,
    "sub.u32": np.subtract,
    "mul.lo.u32": np.multiply,
    "div.u32": np.floor_divide,
    "rem.u32": np.remainder,
    "sub.rn.f32": lambda a, b: (a.view(np.float32) - b.view(np.float32)).view(np.uint32),
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": _permuted,
    "lop3.b32": _logic,
    "mul.rn.f32": lambda a, b: (a.view(np.float32) * b.view(np.float32)).view(np.uint32),
    "cvt.f32.f16": lambda a: (
        a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    ),
    "cvt.rn.f16x2.e4m3x2": _from_8_bits(np.dtype(jnp.float8_e4m3fn)),
    "cvt.rn.f16x2.e5m2x2": _from_8_bits(np.dtype(jnp.float8_e5m2)),
    "setp.ne.u32": np.not_equal,
    "setp.lt.u32": np.less,
    "selp.b32": lambda a, b, which: np.where(which, a, b),
    "shfl.sync.idx.b32": lambda a, lane, *_: a[
        np.arange(THREADS) // 32 * 32 + lane.astype(np.int64)
    ],
}
for _name, _kind in TYPES.items():
    OPERATIONS[f"sub.rn.{_name}x2"] = _by_halves(np.subtract, _kind)
    OPERATIONS[f"mul.rn.{_name}x2"] = _by_halves(np.multiply, _kind)
    OPERATIONS[f"fma.rn.{_name}x2"] = _sum_of_product(_kind)
    OPERATIONS[f"cvt.rn.{_name}x2.f32"] = _to(_kind)


def _match(pattern: str, text: str) -> tuple[Any, ...]:
    found = re.fullmatch(pattern, text, re.DOTALL)
    assert found is not None, text
    return found.groups()


class Warpgroup:
    """128 threads and the shared memory that they load.

    Attributes:
        memory: The bytes.
        ways: The most words that a load has in one bank.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.ways = memory, 0

    def run(self, text: str, *given: Words, results: int = 1) -> list[Words]:
        """Runs a block of PTX; returns its results."""
        values: dict[str, Any] = {f"${results + i}": x for i, x in enumerate(given)}
        threads = np.arange(THREADS, dtype=np.uint32)
        values |= {"%tid.x": threads, "%laneid": threads % 32}
        # Names of several registers in one operand.
        text = re.sub(r"\{([^{}]*)\}", lambda found: found[1].replace(", ", "|"), text.strip("{} "))
        for statement in text.split(";"):
            guard, name, rest = _match(r"\s*(?:@(\w+) )?(\S*)\s*(.*)", statement)
            if not name or name == ".reg":
                continue
            target, *sources = (x.strip() for x in rest.split(","))
            if name.startswith("ld.shared"):
                self._load(values, name, target, sources[0])
                continue
            if name.startswith("ldmatrix"):
                assert name == "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", name
                self._load_matrices(values, target, sources[0])
                continue
            if name.startswith("st.shared"):
                self._store(values, target, sources[0])
                continue
            read = [values[x] if x in values else words(int(x, 0)) for x in sources]
            if "|" in target:
                low, high = target.split("|")
                values[low], values[high] = read[0] & 0xFFFF, read[0] >> 16
                continue
            found = OPERATIONS[name](*read)
            values[target] = np.where(values[guard], found, values[target]) if guard else found
        return [np.asarray(values[f"${i}"]).astype(np.uint32) for i in range(results)]

    def _load(self, values: dict[str, Any], name: str, target: str, source: str) -> None:
        place, offset = _match(r"\[(\$\d+)\+(\d+)\]", source)
        size = {"b32": 4, "b16": 2, "u8": 1}[name.rsplit(".", 1)[1]]
        first, targets = values[place].astype(np.int64) + int(offset), target.split("|")
        assert not (first % (size * len(targets))).any(), "not aligned"
        for i, own in enumerate(targets):
            parts = [
                self.memory[first + i * size + j].astype(np.uint32) << 8 * j for j in range(size)
            ]
            values[own] = np.bitwise_or.reduce(parts)
        at_once = 32 // len(targets)
        for some in first.reshape(-1, at_once):
            asked = {int(x) // 4 + i for x in some for i in range(len(targets))}
            self.ways = max(self.ways, int(np.bincount([x % BANKS for x in asked]).max()))

    def _load_matrices(self, values: dict[str, Any], target: str, source: str) -> None:
        """Each lane of 8 says where a row of 8 halves begins; a thread gets two of a column."""
        place, offset = _match(r"\[(\$\d+)\+(\d+)\]", source)
        first = values[place].astype(np.int64) + int(offset)
        assert not (first % 16).any(), "not aligned"
        lanes = np.arange(THREADS) % 32
        for matrix, own in enumerate(target.split("|")):
            starts = first.reshape(-1, 32)[:, 8 * matrix : 8 * matrix + 8]
            for some in starts:
                asked = [int(x) // 4 + word for x in set(some) for word in range(4)]
                self.ways = max(self.ways, int(np.bincount([x % BANKS for x in asked]).max()))
            found = words(0)
            for beside in range(2):
                row = 2 * (lanes % 4) + beside
                at = starts[np.arange(THREADS) // 32, row] + 2 * (lanes // 4)
                half = (
                    self.memory[at].astype(np.uint32) | self.memory[at + 1].astype(np.uint32) << 8
                )
                found |= half << 16 * beside
            values[own] = found

    def _store(self, values: dict[str, Any], target: str, source: str) -> None:
        place, offset = _match(r"\[(\$\d+)\+(\d+)\]", target)
        first = values[place].astype(np.int64) + int(offset)
        for number, own in enumerate(source.split("|")):
            for byte in range(4):
                self.memory[first + 4 * number + byte] = values[own] >> 8 * byte & 0xFF


def emulated(patch: pytest.MonkeyPatch, group: Warpgroup) -> None:
    """Lets `fragments` run on a warpgroup what it would emit."""

    def run(text: str, *given: Words, loads: bool = False) -> Words:
        del loads
        return group.run(text, *given)[0]

    class Nothing:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    class Types:
        class IntegerType:
            get_signless = staticmethod(lambda bits: bits)

    class Utils:
        nvvm, ir = Nothing(), Types
        warpgroup_barrier = staticmethod(lambda: None)
        bitcast = staticmethod(lambda x, _: x)

        @staticmethod
        def inline_ptx(text: str, *given: Words, result_types: Any = None, **_: Any) -> Any:
            if result_types == 64:
                # A descriptor: its lower half says where the operand begins.
                lower = text.partition(" mov.b32 high")[0]
                return group.run(lower.replace("low", "$0"), *given)[0]
            return group.run(text, *given, results=len(result_types or ()))

    for module in (widen, weights, row_order, small):
        patch.setattr(module, "run", run)
    for module in (widen, fragments, row_order, multiply):
        patch.setattr(module, "utils", Utils)
    patch.setattr(multiply, "wgmma", functools.partial(_multiplied, group))
    patch.setattr(sums, "scaled", _scaled)


def _multiplied(
    group: Warpgroup,
    sums: np.ndarray,
    own: Sequence[Words],
    descriptor: Words,
    form: Form,
    *,
    begins: bool,
) -> np.ndarray:
    """What a WGMMA adds to sums, `[block of 8 columns, row, column, thread]`."""
    kind = TYPES[{"bfloat16": "bf16", "float16": "f16"}[str(form.to)]]
    left, threads = np.zeros((64, 16)), np.arange(THREADS)
    rows, cols = 16 * (threads // 32) + threads % 32 // 4, 2 * (threads % 4)
    for number, word in enumerate(own):
        for beside, half in enumerate(_halves(word, kind)):
            left[rows + 8 * (number % 2), cols + 8 * (number // 2) + beside] = half.astype(
                np.float64
            )
    first = (int(descriptor[0]) & 0x3FFF) << 4
    k, col = np.meshgrid(np.arange(16), np.arange(form.cols), indexing="ij")
    at = first + col * 128 + 2 * k
    at ^= at >> 3 & 0x70
    right = np.stack([group.memory[at], group.memory[at + 1]], -1).view(kind)[..., 0]
    product = left @ right.astype(np.float64)
    found = np.zeros_like(sums) if begins else sums.copy()
    for block, below, beside in np.ndindex(*sums.shape[:3]):
        more = product[rows + 8 * below, 8 * block + cols + beside]
        found[block, below, beside] = found[block, below, beside] + more
    return found


def _scaled(sums: np.ndarray, own: np.ndarray, scales: Sequence[Words]) -> np.ndarray:
    """Adds sums of a group to others, times a scale for each of two rows."""
    found, each = sums.copy(), [x.view(np.float32).astype(np.float64) for x in scales]
    for place in np.ndindex(*sums.shape):
        found[place] = sums[place] + own[place] * each[place[1]]
    return found


def registers(*shape: int) -> np.ndarray:
    """Registers of floats that are 0."""
    found = np.empty(shape, object)
    for place in np.ndindex(*shape):
        found[place] = np.zeros(THREADS)
    return found
