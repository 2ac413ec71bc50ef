"""Random products: what is multiplied, how it is stored, what follows the sum, who computes it.

A case is its seed and its index: the same numbers give the same product on any computer.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gemm
from pallas_gemm.config import CLUSTERS, GemmConfig
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.problem import Problem
from pallas_gemm.tuning.space import CONSUMERS, TILE_COLUMNS
from tests import reference
from tests.reference import Formula

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FLOATS = (
    (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.bfloat16, jnp.float32),
    (jnp.float16, jnp.float16, jnp.float16),
    (jnp.float32, jnp.float32, jnp.float32),
    (jnp.float32, jnp.float32, jnp.bfloat16),
)
TYPES = (
    *FLOATS,
    (E4M3, E4M3, jnp.bfloat16),
    (E4M3, E5M2, jnp.float32),
    (E5M2, E4M3, jnp.float16),
    (jnp.int8, jnp.int8, jnp.int32),
)
"""Of the left and the right operand and of the result, as the contract tests have them."""

SMOOTH = ("gelu", "gelu_exact", "silu", "sigmoid", "tanh")
"""Activations that are not exact, for real numbers."""

ORDERS = (
    *("raster", "raster:cols", "swizzle:3", "swizzle:8", "hilbert", "clipped_hilbert"),
    *("nested_swizzle:4x2", "log_swizzle:2", "online_raster", "online_swizzle:4"),
)

KINDS = ("plain", "order", "config", "gated", "gradient", "mapped", "real")
SHARES = (0.3, 0.12, 0.26, 0.08, 0.08, 0.04, 0.12)
"""How often each kind is drawn; of 5,000 products, 600 are of real numbers."""

NEAR = (64, 128, 256)
"""What tiles and steps are multiples of; sizes beside their multiples are the edges."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One product.

    Attributes:
        kind: One of `KINDS`.
        batch: How many products of this size; 0 for one without a leading dimension.
        sizes: m, n and k.
        types: Of the operands and the result.
        formula: Layouts, scales and activation.
        bias: There is one.
        residual: There is one.
        shared: The right operand belongs to the whole batch.
        banded: The operands are slices of larger arrays, full of values that no product may see.
        order: The `schedule=`, if one is named.
        config: The `config=`, if one is named.
        seed: Of the operands.
    """

    kind: str
    batch: int
    sizes: tuple[int, int, int]
    types: tuple[Any, Any, Any]
    formula: Formula
    bias: bool = False
    residual: bool = False
    shared: bool = False
    banded: bool = False
    order: str | None = None
    config: GemmConfig | None = None
    seed: tuple[int, ...] = ()

    def __str__(self) -> str:
        m, n, k = self.sizes
        names = "-".join(jnp.dtype(dtype).name for dtype in self.types)
        flags = [name for name in ("bias", "residual", "shared", "banded") if getattr(self, name)]
        return (
            f"{self.kind} {self.batch or 1}x{m}x{n}x{k} {names} {self.formula} {' '.join(flags)}"
            f" order={self.order} config={self.config}"
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each operand, by its name as an argument."""
        m, n, k = self.sizes
        lead = (self.batch,) if self.batch else ()
        right = () if self.shared else lead
        b = (*right, n, k) if self.formula.transpose_b else (*right, k, n)
        shapes: dict[str, tuple[int, ...]] = {
            "a": (*lead, k, m) if self.formula.transpose_a else (*lead, m, k),
            "b": b,
        }
        if self.kind == "gated":
            shapes["up"] = b
        if self.bias:
            shapes["bias"] = (n,)
        if self.residual:
            shapes["residual"] = (*lead, m, n)
        return shapes

    @property
    def dtypes(self) -> dict[str, Any]:
        """The type of each operand."""
        a, b, out = self.types
        return {"a": a, "b": b, "up": b, "bias": jnp.float32, "residual": out}

    def operands(self) -> dict[str, np.ndarray]:
        """Draws the operands, on the host: real numbers for "real", small integers else."""
        rng = np.random.default_rng(self.seed)
        draw = (
            (lambda shape: rng.standard_normal(shape, np.float32))
            if self.kind == "real"
            else (lambda shape: rng.integers(-2, 3, shape, np.int8))
        )
        drawn = {name: draw(shape) for name, shape in self.shapes.items()}
        if self.kind == "real" and self.types[0] == jnp.float32:
            # What TF32 holds of them, so that both sides multiply the same numbers.
            for name in ("a", "b"):
                kept = drawn[name].view(np.uint32) & np.uint32(0xFFFFE000)
                drawn[name] = kept.view(np.float32)
        return {name: value.astype(self.dtypes[name]) for name, value in drawn.items()}

    def product(self, implementation: str | None, **extra: Any) -> Callable[..., jax.Array]:
        """Returns the function of the operands, by name."""
        options = {"preferred_element_type": self.types[2], "implementation": implementation}
        if implementation != "xla":
            options |= {"schedule": self.order, "config": self.config}
        options |= extra
        formula: dict[str, Any] = dataclasses.asdict(self.formula)
        if not self.residual:
            # It would be warned of.
            del formula["beta"]
        if self.kind == "gated":
            flags = {name: formula[name] for name in ("transpose_a", "transpose_b", "activation")}
            return lambda a, b, up: pallas_gemm.gated_gemm(a, b, up, **flags, **options)

        def call(**operands: jax.Array) -> jax.Array:
            return pallas_gemm.gemm(**operands, **formula, **options)

        if self.kind != "mapped":
            return call
        axes = {name: 0 if name in ("a", "residual") else None for name in self.shapes}
        axes["b"] = None if self.shared else 0
        return lambda **operands: jax.vmap(
            lambda given: call(**given), in_axes=({name: axes[name] for name in operands},)
        )(operands)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large the products are, and who computes them.

    Attributes:
        most: The largest size.
        elements: Of an operand or the result at most, over the whole batch.
        kinds: The kinds that are drawn, and how often.
        implementation: Which one is asked for first; where it refuses, the default computes.
        tiles: Rows of the tiles of drawn configs, and the warpgroups that share them.
        columns: Columns of these tiles.
    """

    most: int
    elements: int
    kinds: Mapping[str, float]
    implementation: str
    tiles: Mapping[int, int]
    columns: tuple[int, ...]


GPU = Scale(4096, 1 << 25, dict(zip(KINDS, SHARES, strict=True)), "hopper", CONSUMERS, TILE_COLUMNS)
# The simulator takes its time: small tiles, and a few of them.
SIMULATED = Scale(
    330,
    1 << 16,
    {"plain": 0.25, "order": 0.15, "config": 0.45, "gated": 0.1, "mapped": 0.05},
    "interpret",
    {64: 1, 128: 2},
    (64, 80, 128),
)


def draw(seed: int, index: int, scale: Scale) -> Case:
    """Draws one case."""
    rng = np.random.default_rng((seed, index))
    kind = str(rng.choice(list(scale.kinds), p=list(scale.kinds.values())))
    types = _one(rng, {"real": FLOATS, "gradient": FLOATS, "gated": TYPES[:-1]}.get(kind, TYPES))
    plain = types[0] == jnp.int8
    activations = SMOOTH if kind == "real" else ("relu",)
    gated = kind == "gated"
    formula = Formula(
        transpose_a=bool(rng.integers(2)),
        transpose_b=bool(rng.integers(2)),
        activation=None if plain or rng.random() < 0.6 else str(rng.choice(activations)),
        alpha=1 if plain or gated else float(rng.choice([1, 1, 2, -0.5])),
        beta=1 if plain or gated else float(rng.choice([1, 0.5])),
    )
    batch = int(rng.integers(1, 6)) if kind == "mapped" or rng.random() < 0.25 else 0
    case = Case(
        kind,
        batch if kind not in ("gated", "gradient", "real") else 0,
        _sizes(rng, scale.most, real=kind == "real", wide=types[0] == jnp.float32),
        types,
        formula,
        bias=not plain and not gated and bool(rng.random() < 0.4),
        residual=not plain and not gated and bool(rng.random() < 0.3),
        shared=bool(rng.integers(2)),
        banded=bool(rng.random() < 0.3),
        order=str(rng.choice(ORDERS)) if kind == "order" else None,
        seed=(seed, index, 1),
    )
    case = _within_memory(case, scale)
    return dataclasses.replace(case, config=_config(rng, case, scale)) if kind == "config" else case


def _one(rng: np.random.Generator, choices: tuple[Any, ...]) -> Any:
    return choices[rng.integers(len(choices))]


def _sizes(rng: np.random.Generator, most: int, *, real: bool, wide: bool) -> tuple[int, int, int]:
    """Draws m, n and k.

    Args:
        rng: Where they come from.
        most: The largest.
        real: The rule for real numbers is to be applied: no tile of a few elements, on which XLA's
            error can be zero by chance.
        wide: The operands are float32, small products of which XLA computes in another precision.
    """
    if real:
        least = 1024 if wide else 64
        whole = 8 * rng.integers(least // 8, most // 8 + 1, 3)
        return tuple(int(size) + 32 * (0 < size % 64 < 32) for size in whole)  # type: ignore[return-value]
    return tuple(_size(rng, most) for _ in range(3))  # type: ignore[return-value]


def _size(rng: np.random.Generator, most: int) -> int:
    kind = rng.random()
    if kind < 0.1:
        return int(rng.choice([0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33]))
    if kind < 0.5:
        step = int(rng.choice([near for near in NEAR if near <= most]))
        beside = step * rng.integers(1, most // step + 1) + rng.choice([-8, -1, 0, 0, 1, 8])
        return int(min(most, beside))
    if kind < 0.75:
        return 8 * int(rng.integers(1, most // 8 + 1))
    return int(np.exp(rng.uniform(0, np.log(most + 1))))


def _within_memory(case: Case, scale: Scale) -> Case:
    """Returns the case with a batch of which the reference is soon computed."""
    m, n, k = case.sizes
    largest = max(m * n, m * k, n * k, 1)
    return dataclasses.replace(case, batch=min(case.batch, max(1, scale.elements // largest)))


def _config(rng: np.random.Generator, case: Case, scale: Scale) -> GemmConfig | None:
    """Draws configs until the call takes one; None after many."""
    for _ in range(40):
        config = _any_config(rng, case, scale)
        if config is None:
            continue
        tried = dataclasses.replace(case, config=config)
        shapes = {
            name: jax.ShapeDtypeStruct(shape, case.dtypes[name])
            for name, shape in case.shapes.items()
        }
        try:
            jax.eval_shape(tried.product(scale.implementation), **shapes)
        except (TypeError, ValueError):
            continue
        return config
    return None


def _any_config(rng: np.random.Generator, case: Case, scale: Scale) -> HopperConfig | None:
    """Draws what a config can say; None where no number of stages makes it legal."""
    m, n, k = (max(1, size) for size in case.sizes)
    a, b, out = case.types
    problem = Problem(m, n, k, a, b, out, batch=max(1, case.batch))
    rows = int(rng.choice(list(scale.tiles)))
    pingpong = bool(rng.random() < 0.2)
    online = bool(rng.random() < 0.3)
    try:
        config = HopperConfig(
            tile=(rows, int(rng.choice(scale.columns))),
            cluster=_one(rng, CLUSTERS),
            persistence=_one(rng, ("none", "static", "dynamic")),
            schedule="online_swizzle:8" if online else str(rng.choice(ORDERS[:8])),
            ctas=_one(rng, (None, 4, 8) if scale is SIMULATED else (None, None, 8, 100)),
            store_columns=int(rng.choice([16, 32, 64])),
            store_slots=int(rng.integers(1, 4)),
            consumers=2 if pingpong else scale.tiles[rows],
            pingpong=pingpong,
            late_store=not online and bool(rng.integers(2)),
            mirrored=bool(rng.random() < 0.3),
        )
    except ValueError:
        # Such as a tile too large for the registers of its consumers.
        return None
    for stages in rng.permutation(np.arange(2, 8)):
        deep = dataclasses.replace(config, stages=int(stages))
        try:
            fits = deep.shared_memory_bytes(problem) <= H200.shared_memory
        except ValueError:
            return None
        if fits:
            return deep
    return None


def wide(operands: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the operands in float64."""
    return {name: reference.wide(value) for name, value in operands.items()}
