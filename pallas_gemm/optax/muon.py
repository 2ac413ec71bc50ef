"""Muon, whose symmetric products are computed by half.

A step of Newton and Schulz is three products. The result of `x @ x.T` is symmetric, and its square
is symmetric too: the kernels compute half of both. Matrices of one size are orthogonalized as one
batch.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from pallas_gemm.api.gemm import gemm
from pallas_gemm.api.symmetric import gram, symmetric_matmul

Coefficients = tuple[float, float, float]
Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]

STANDARD: Coefficients = (3.4445, -4.7750, 2.0315)
PRESETS: dict[str, tuple[Any, ...]] = {
    "standard": STANDARD,
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Names of coefficients."""
PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")
MATRIX = MuonDimensionNumbers()


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The iteration of Newton and Schulz.

    Attributes:
        coefficients: Three numbers for each step.
        preconditioning: The way to make singular values small enough before the first step.
        eps: The least number that is divided by.
    """

    coefficients: tuple[Coefficients, ...]
    preconditioning: str
    eps: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns wide matrices orthogonalized."""
        if self.preconditioning in ("frobenius", "spectral"):
            order = 2 if self.preconditioning == "spectral" else "fro"
            norms = jnp.linalg.norm(x, ord=order, axis=(-2, -1), keepdims=True)
            x = x / (norms + self.eps).astype(x.dtype)
        for step, (first, second, third) in enumerate(self.coefficients):
            a = gram(x)
            if step == 0 and self.preconditioning in ("aol", "schatten"):
                scale = self._scale(a)
                x, a = x * scale, a * scale * jnp.swapaxes(scale, -1, -2)
            b = symmetric_matmul(a, a, alpha=third, beta=second, residual=a)
            x = gemm(b, x, beta=first, residual=x)
        return x

    def _scale(self, a: jax.Array) -> jax.Array:
        """Returns what the rows of a matrix are multiplied with, from its product with itself."""
        if self.preconditioning == "aol":
            size = jnp.sum(jnp.abs(a), axis=-1, keepdims=True)
        else:
            size = jnp.linalg.norm(a, axis=(-2, -1), keepdims=True)
        return jax.lax.rsqrt(jnp.maximum(size, self.eps).astype(a.dtype))


def orthogonalized(
    x: jax.Array,
    ns_coeffs: Any = STANDARD,
    ns_steps: int = 5,
    preconditioning: Preconditioning = "frobenius",
    eps: float = 1e-8,
) -> jax.Array:
    """Returns `u @ v.T`, about, of a matrix `u @ s @ v.T`; of each one, if there are several.

    >>> y = orthogonalized(x)

    Args:
        x: A matrix, or several: leading dimensions are those of a batch.
        ns_coeffs: As for `optax.contrib.muon`.
        ns_steps: As for `optax.contrib.muon`.
        preconditioning: As for `optax.contrib.muon`.
        eps: As for `optax.contrib.muon`.

    Raises:
        ValueError: An argument is none of those that are legal.
        TypeError: The matrix is of complex numbers.
    """
    result = _steps(ns_coeffs, ns_steps, preconditioning, eps)(_wide(x))
    return result if result.shape == x.shape else jnp.swapaxes(result, -1, -2)


def scale_by_muon(  # noqa: PLR0913 - those of optax
    ns_coeffs: Any = STANDARD,
    ns_steps: int = 5,
    beta: Any = 0.95,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    weight_dimension_numbers: Any = None,
) -> optax.GradientTransformation:
    """Returns `optax.contrib.scale_by_muon`, with the same arguments and the same state.

    The coefficients are those of this call, whatever a state says that was loaded.

    >>> transformation = scale_by_muon(mu_dtype=jnp.float32)

    Args:
        ns_coeffs: As for `optax.contrib.scale_by_muon`, as all others. They are numbers.
        ns_steps: The number of steps.
        beta: The decay of the mean of gradients.
        eps: The least number that is divided by.
        mu_dtype: The type of the mean.
        nesterov: The mean looks one step ahead.
        adaptive: Updates are scaled by their product with the mean.
        preconditioning: The way to scale a matrix before the first step.
        weight_dimension_numbers: Which dimensions are the rows and columns of a matrix.

    Raises:
        ValueError: As for `orthogonalized`.
    """
    steps = _steps(ns_coeffs, ns_steps, preconditioning, eps)
    mu_dtype = None if mu_dtype is None else jax.dtypes.canonicalize_dtype(mu_dtype)

    def init(params: Any) -> MuonState:
        mean = optax.tree.zeros_like(params, dtype=mu_dtype)
        return MuonState(jnp.zeros([], jnp.int32), mean, jnp.asarray(_coefficients(ns_coeffs)))

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, MuonState]:
        del params
        mean = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        whole = _unbiased(mean, updates, beta, count, nesterov=nesterov)
        result = _together(steps, whole, _dimensions(weight_dimension_numbers, updates))
        if adaptive:
            result = jax.tree.map(lambda x, y: jnp.sum(x * y) * y, whole, result)
        return result, MuonState(count, optax.tree.cast(mean, mu_dtype), state.ns_coeffs)

    return optax.GradientTransformation(init, update)


def _unbiased(mean: Any, updates: Any, beta: Any, count: Any, *, nesterov: bool) -> Any:
    """Returns a mean of gradients without its bias towards zero, one step ahead if asked for."""
    if not nesterov:
        return optax.tree.bias_correction(mean, beta, count)
    ahead = optax.tree.bias_correction(mean, beta, optax.safe_increment(count))
    now = optax.tree.bias_correction(updates, beta, count)
    return jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)


def muon(  # noqa: PLR0913 - those of optax
    learning_rate: Any,
    ns_coeffs: Any = STANDARD,
    ns_steps: int = 5,
    beta: Any = 0.95,
    eps: float = 1e-8,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    adam_eps_root: Any = 0.0,
    adam_weight_decay: Any = 0.0,
    adam_learning_rate: Any = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: Any = None,
) -> optax.GradientTransformation:
    """Returns `optax.contrib.muon`, with the same arguments and the same state.

    Muon changes the matrices, and AdamW everything else. The state of a checkpoint may be of either
    function.

    >>> optimizer = muon(learning_rate=2e-2, weight_decay=0.1)

    Args:
        learning_rate: As for `optax.contrib.muon`, as all others: a number or a schedule.
        ns_coeffs: The coefficients, numbers or the name of a preset.
        ns_steps: As for `scale_by_muon`.
        beta: As for `scale_by_muon`.
        eps: As for `scale_by_muon`; AdamW's, too.
        weight_decay: How fast matrices decay.
        weight_decay_mask: Which of them do.
        mu_dtype: As for `scale_by_muon`; AdamW's, too.
        nesterov: As for `scale_by_muon`; AdamW's, too.
        adaptive: As for `scale_by_muon`.
        preconditioning: As for `scale_by_muon`.
        adam_b1: As for `optax.adamw`.
        adam_b2: As for `optax.adamw`.
        adam_eps_root: As for `optax.adamw`.
        adam_weight_decay: As for `optax.adamw`.
        adam_learning_rate: As for `optax.adamw`; None is `learning_rate`.
        muon_weight_dimension_numbers: `MuonDimensionNumbers` of each parameter, or None of those
            that are AdamW's; or a function of the parameters. By default Muon has the matrices.
        consistent_rms: Scales updates as AdamW's are; 0.2 is usual.

    Raises:
        ValueError: As for `orthogonalized`.
    """
    dimensions = functools.partial(_dimensions, muon_weight_dimension_numbers)
    scaled = functools.partial(_scaled, consistent_rms)

    def labels(params: Any) -> Any:
        # The tree is that of the parameters: where it has None, there is no parameter to label.
        return jax.tree.map(
            lambda _, own: "adam" if own is None else "muon", params, dimensions(params)
        )

    matrices = optax.chain(
        scale_by_muon(
            *(ns_coeffs, ns_steps, beta, eps, mu_dtype),
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
            weight_dimension_numbers=dimensions,
        ),
        optax.stateless(lambda updates, _: jax.tree.map(scaled, updates, dimensions(updates))),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
    )
    return optax.partition({"muon": matrices, "adam": adam}, labels)


def _steps(ns_coeffs: Any, ns_steps: int, preconditioning: str, eps: float) -> _Steps:
    """Returns the iteration that a caller describes.

    Raises:
        ValueError: There is none.
    """
    if preconditioning not in PRECONDITIONINGS:
        raise ValueError(
            f"preconditioning must be one of {', '.join(map(repr, PRECONDITIONINGS))}, got"
            f" {preconditioning!r}"
        )
    numbers = _coefficients(ns_coeffs)
    if numbers.ndim == 1:
        numbers = np.tile(numbers, (ns_steps, 1))
    if len(numbers) > ns_steps:
        raise ValueError(
            f"ns_steps must be at least {len(numbers)}, the number of rows of ns_coeffs, got"
            f" {ns_steps}"
        )
    each = tuple((float(first), float(second), float(third)) for first, second, third in numbers)
    return _Steps(each, preconditioning, eps)


def _coefficients(given: Any) -> np.ndarray:
    """Returns coefficients as numbers: three, or three for each step.

    Raises:
        ValueError: They are others, or have a name that nobody knows.
    """
    if isinstance(given, str):
        if given not in PRESETS:
            legal = ", ".join(map(repr, PRESETS))
            raise ValueError(f"ns_coeffs={given!r} is unknown; legal: {legal}, or numbers")
        given = PRESETS[given]
    numbers = np.asarray(given, np.float64)
    if numbers.ndim not in (1, 2) or numbers.shape[-1] != 3:
        raise ValueError(f"ns_coeffs must be [3] or [n, 3], got {list(numbers.shape)}")
    return numbers


def _is_one(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, MuonDimensionNumbers)


def _dimensions(given: Any, params: Any) -> Any:
    """Returns the dimensions of each parameter; None of those that are no matrix.

    Args:
        given: The dimensions that the caller names; None leaves it to their rank.
        params: The parameters, or something of their shapes.
    """
    if given is None:
        return jax.tree.map(lambda x: MATRIX if x.ndim == 2 else None, params)
    given = given(params) if callable(given) else given
    # It may say something of a whole branch of the tree.
    return jax.tree.map(
        lambda own, branch: jax.tree.map(lambda _: own, branch), given, params, is_leaf=_is_one
    )


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The dimensions of a parameter that are those of a matrix.

    Attributes:
        rows: The dimensions that a product with it contracts.
        cols: The dimensions that its result has.
        batch: All others.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    batch: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, given: Any) -> "_Axes":
        """Returns those that a caller names.

        Raises:
            ValueError: They are none, or one is both.
        """
        if not isinstance(given, MuonDimensionNumbers):
            raise ValueError(
                f"a parameter of shape {list(x.shape)} is no matrix; weight_dimension_numbers says"
                " which of its dimensions are rows and columns"
            )
        rows, cols = (
            tuple(axis % x.ndim for axis in ((own,) if isinstance(own, int) else own))
            for own in given
        )
        if {*rows} & {*cols}:
            raise ValueError(f"a dimension must not be both a row and a column, got {given}")
        return cls(rows, cols, tuple(i for i in range(x.ndim) if i not in (*rows, *cols)))

    def sizes(self, x: Any) -> tuple[int, int]:
        """Returns how many rows and columns a matrix has."""
        rows, cols = (math.prod(x.shape[axis] for axis in own) for own in (self.rows, self.cols))
        return rows, cols

    def matrices(self, x: jax.Array) -> jax.Array:
        """Returns a parameter as `[batch, rows, columns]`."""
        turned = x.transpose(*self.batch, *self.rows, *self.cols)
        rows, cols = self.sizes(x)
        return turned.reshape(math.prod(x.shape[axis] for axis in self.batch), rows, cols)

    def restored(self, matrices: jax.Array, x: jax.Array) -> jax.Array:
        """Returns matrices in the shape of the parameter that they come from."""
        order = (*self.batch, *self.rows, *self.cols)
        turned = matrices.reshape([x.shape[axis] for axis in order])
        return turned.transpose(*np.argsort(order).tolist())


def _scaled(consistent_rms: Any, update: jax.Array, given: Any) -> jax.Array:
    """Scales an update by the shape of its matrix."""
    rows, cols = _Axes.of(update, given).sizes(update)
    if consistent_rms is None:
        return update * math.sqrt(max(1.0, cols / rows))
    return update * (math.sqrt(max(rows, cols)) * consistent_rms)


def _wide(x: jax.Array) -> jax.Array:
    """Returns matrices with no more rows than columns.

    Raises:
        TypeError: They are of complex numbers.
    """
    if jnp.iscomplexobj(x):
        raise TypeError(f"x must be real, got {x.dtype}; optax.contrib.muon takes complex numbers")
    return jnp.swapaxes(x, -1, -2) if x.shape[-2] > x.shape[-1] else x


def _together(steps: _Steps, tree: Any, dimensions: Any) -> Any:
    """Returns each parameter of a tree orthogonalized, matrices of one size as one batch."""
    leaves, structure = jax.tree.flatten(tree)
    given = structure.flatten_up_to(dimensions)
    axes = [_Axes.of(x, own) for x, own in zip(leaves, given, strict=True)]
    each = [own.matrices(x) for x, own in zip(leaves, axes, strict=True)]
    alike: dict[Any, list[int]] = {}
    for place, x in enumerate(each):
        alike.setdefault((_wide(x).shape[1:], x.dtype), []).append(place)
    for places in alike.values():
        whole = steps(jnp.concatenate([_wide(each[place]) for place in places]))
        ends = np.cumsum([len(each[place]) for place in places])[:-1].tolist()
        for place, x in zip(places, jnp.split(whole, ends), strict=True):
            is_turned = each[place].shape[1:] != x.shape[1:]
            each[place] = jnp.swapaxes(x, -1, -2) if is_turned else x
    restored = [own.restored(y, x) for own, y, x in zip(axes, each, leaves, strict=True)]
    return jax.tree.unflatten(structure, restored)
