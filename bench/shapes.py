"""What is benchmarked: cases, and the text that names one.

The text of a case is `MxNxK`, followed by what is not the default:

    4096x14336x4096              bf16, both operands row-major
    8192x8192x8192:NT            the right operand is stored [n, k]
    2048x2048x128:b32:f16        a batch of 32, in f16
    8192x8192x8192:bias_gelu     with an epilogue
    8192x8192x8192:backward      the gradients of both operands
    16384x4096x4096:g8           rows in 8 groups, each with a right operand of its own
    16384x4096x4096:g8:zipf      of which group r has 1/r of the rows
    2048x2048x8192:NT:gram       x @ x.T, whose result is symmetric; TN for x.T @ x
    8192x8192x8192:e4m3:NT:blocks    a scale for each 1 x 128 on the left, 128 x 128 on the right
"""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gemm.problem import Problem

DTYPES: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {
        "bf16": (jnp.bfloat16, jnp.bfloat16),
        "f16": (jnp.float16, jnp.float16),
        "f32": (jnp.float32, jnp.float32),
        "e4m3": (jnp.float8_e4m3fn, jnp.bfloat16),
        "e5m2": (jnp.float8_e5m2, jnp.bfloat16),
        "int8": (jnp.int8, jnp.int32),
    }
)
"""Name of a dtype to those of the operands and of the result."""

LAYOUTS = ("NN", "NT", "TN", "TT")
EPILOGUES = ("none", "bias", "bias_gelu", "residual", "swiglu")
DIRECTIONS = ("forward", "backward", "both")
ROUTINGS = ("uniform", "zipf", "one", "empty")
FACTORS = ("two", "gram")
SCALES = ("unscaled", "blocks")
BLOCK = 128
"""Elements that share a scale, along each dimension that has blocks."""
NAMED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dtype": tuple(DTYPES),
        "layout": LAYOUTS,
        "epilogue": EPILOGUES,
        "direction": DIRECTIONS,
        "routing": ROUTINGS,
        "factors": FACTORS,
        "scales": SCALES,
    }
)
"""The fields of a case that are one of a few words, each of which is an option of its text."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One product to time.

    Attributes:
        m: Rows of the result.
        n: Columns of the result; with "swiglu", of each of the two products.
        k: The contracted size.
        dtype: One of `DTYPES`.
        layout: Two letters, for the left and the right operand: N row-major, T stored transposed.
        batch: How many products.
        epilogue: The epilogue: "bias" (a row vector), "bias_gelu" (and the tanh form of gelu),
            "residual" (a matrix is added), "swiglu" (silu(a @ gate) * (a @ up)).
        direction: "forward"; "backward" for the gradients of both operands; or "both".
        groups: How many groups the rows are in; 0 for none.
        routing: How they are dealt out: "uniform", "zipf" (group r has 1/r of the rows), "one" (has
            all), "empty" (every other group is, and the others are alike).
        factors: "two", or "gram" where one array is both, of which one is transposed; XLA computes
            the whole of that, and its work is what counts.
        scales: "unscaled", or "blocks" where a row of the left operand has a scale for each 128
            elements, and the right operand for each 128 x 128.
        source: The model that it comes from, or what it is there to show.
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    layout: str = "NN"
    batch: int = 1
    epilogue: str = "none"
    direction: str = "forward"
    groups: int = 0
    routing: str = "uniform"
    factors: str = "two"
    scales: str = "unscaled"
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("m", "n", "k", "batch"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        for field, legal in NAMED.items():
            if getattr(self, field) not in legal:
                raise ValueError(
                    f"{field} must be one of {', '.join(legal)}, got {getattr(self, field)!r}"
                )
        if self.direction != "forward" and self.epilogue != "none":
            raise ValueError(f"direction={self.direction!r} is measured without an epilogue only")
        if self.batch > 1 and self.epilogue != "none":
            raise ValueError(f"epilogue={self.epilogue!r} is measured without a batch only")
        if self.groups and (self.batch, self.epilogue, self.layout[0]) != (1, "none", "N"):
            raise ValueError(
                "groups are measured with a row-major left operand, and without an epilogue or a"
                f" batch only, got {self.name}"
            )
        bare = self.groups, self.epilogue, self.direction
        square = self.m == self.n and self.layout in ("NT", "TN")
        if self.factors == "gram" and not (square and bare == (0, "none", "forward")):
            raise ValueError(
                "gram is measured in the layouts NT and TN, for a square result that is forward and"
                f" has no epilogue or groups, got {self.name}"
            )
        if self.scales == "blocks":
            self._check_blocks()
        if self.routing != "uniform" and not self.groups:
            raise ValueError(f"routing={self.routing!r} is one of groups, of which there are none")

    def _check_blocks(self) -> None:
        """Raises `ValueError` if a case with scales of blocks is not what is measured of them."""
        rest = (self.dtype, self.layout, self.batch, self.factors)
        rest += (self.groups, self.epilogue, self.direction)
        if rest != ("e4m3", "NT", 1, "two", 0, "none", "forward"):
            raise ValueError(
                "blocks are measured of one product of e4m3 in the layout NT that is forward and"
                f" has no epilogue or groups, got {self.name}"
            )
        if self.k % (4 * BLOCK):
            raise ValueError(f"with blocks, k must be a multiple of {4 * BLOCK}, got {self.k}")

    @property
    def name(self) -> str:
        """The text that `parse` reads as this case."""
        options = [
            (self.dtype, "bf16"),
            (self.layout, "NN"),
            (f"b{self.batch}", "b1"),
            (f"g{self.groups}", "g0"),
            (self.routing, "uniform"),
            (self.factors, "two"),
            (self.scales, "unscaled"),
            (self.epilogue, "none"),
            (self.direction, "forward"),
        ]
        parts = [f"{self.m}x{self.n}x{self.k}"]
        return ":".join(parts + [value for value, default in options if value != default])

    @property
    def problem(self) -> Problem:
        """The product without its epilogue (of "swiglu", one of the two)."""
        operands, result = DTYPES[self.dtype]
        return Problem(
            self.m,
            self.n,
            self.k,
            operands,
            operands,
            result,
            transpose_a=self.layout[0] == "T",
            transpose_b=self.layout[1] == "T",
            batch=self.batch,
            groups=self.groups,
        )

    @property
    def is_bare(self) -> bool:
        """Whether it is a product of two operands and nothing more."""
        words = self.epilogue, self.direction, self.factors, self.scales
        return words == ("none", "forward", "two", "unscaled") and not self.groups

    @property
    def sizes(self) -> np.ndarray:
        """How many rows each group has."""
        group = np.arange(self.groups)
        share = {
            "uniform": np.ones(self.groups),
            "zipf": 1 / (group + 1),
            "one": group == self.groups // 2,
            "empty": group % 2 == 0,
        }[self.routing]
        ends = np.round(self.m * np.cumsum(share) / share.sum())
        return np.diff(ends, prepend=0).astype(np.int32)

    @property
    def scale_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the scales of blocks, by their names in `gemm`; empty without blocks."""
        if self.scales != "blocks":
            return {}
        deep = self.k // BLOCK
        return {"row_scale": (self.m, deep), "col_scale": (deep, -(-self.n // BLOCK))}

    @property
    def products(self) -> int:
        """How many products of the size of `problem` are computed."""
        both = {"forward": 1, "backward": 2, "both": 3}[self.direction]
        return both * (2 if self.epilogue == "swiglu" else 1)

    @property
    def flops(self) -> int:
        """Multiplications plus additions of the products; the epilogue is not counted."""
        return self.products * self.problem.flops

    @property
    def bytes(self) -> int:
        """The fewest bytes that must move: every operand and every result once."""
        problem = self.problem
        a = int(np.prod(problem.a_shape)) * problem.a_dtype.itemsize
        b = int(np.prod(problem.b_shape)) * problem.b_dtype.itemsize
        out = int(np.prod(problem.out_shape)) * problem.out_dtype.itemsize
        forward = a + out if self.factors == "gram" else a + b + out
        if self.scales == "blocks":
            forward += 4 * sum(rows * cols for rows, cols in self.scale_shapes.values())
        if self.epilogue == "swiglu":
            forward += b
        if self.epilogue == "residual":
            forward += out
        # The gradients are as large as their operands.
        backward = out + 2 * (a + b)
        return {"forward": forward, "backward": backward, "both": forward + backward}[
            self.direction
        ]


def parse(text: str) -> Case:
    """Returns the case that a text names; the module's docstring has the grammar.

    Raises:
        ValueError: It names none.
    """
    sizes, *options = text.strip().split(":")
    found = re.fullmatch(r"(\d{1,7})x(\d{1,7})x(\d{1,7})", sizes)
    if not found:
        raise ValueError(f"shape must be MxNxK as in 4096x14336x4096, got {text!r}")
    fields: dict[str, Any] = {}
    for option in options:
        field = _field_of(option)
        if field is None:
            named = [word for legal in NAMED.values() for word in legal]
            legal = ", ".join([*named, "b32 for a batch", "g8 for groups"])
            raise ValueError(f"shape {text!r}: {option!r} is no option; legal are {legal}")
        if field in fields:
            raise ValueError(f"shape {text!r}: {option!r} sets {field} a second time")
        fields[field] = int(option[1:]) if field in ("batch", "groups") else option
    m, n, k = map(int, found.groups())
    return Case(m, n, k, **fields)


def _field_of(option: str) -> str | None:
    """Returns which field of a case an option sets."""
    for field, legal in NAMED.items():
        if option in legal:
            return field
    counted = {"b": "batch", "g": "groups"}
    return counted.get(option[:1]) if re.fullmatch(r"[bg][1-9]\d{0,4}", option) else None
