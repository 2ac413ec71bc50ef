"""The softmax of a product's rows, and losses that have one, are computed by its kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

from pallas_gemm import accelerate, target
from pallas_gemm.rewriting import folds
from tests.reference import normal
from tests.rewriting.test_folds import BF16, SHAPE, _check, count, exact, rewritten, step

pytestmark = pytest.mark.usefixtures("as_users_write")

WORDS = 256


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _with_numbers(x: Any, w: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(_wide(x @ w), labels).mean()


def _picked(x: Any, w: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(_wide(x @ w))
    return -jnp.take_along_axis(logs, labels[..., None], -1).mean()


def _mapped(x: Any, w: Any, labels: Any) -> Any:
    def pick(row: Any, label: Any) -> Any:
        return row[label]

    for _ in labels.shape:
        pick = jax.vmap(pick)
    return -pick(jax.nn.log_softmax(_wide(x @ w)), labels).mean()


def _indexed(x: Any, w: Any, labels: Any) -> Any:
    rows = jnp.indices(labels.shape, sparse=True)
    return -jax.nn.log_softmax(_wide(x @ w))[(*rows, labels)].mean()


def _with_ones(x: Any, w: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(_wide(x @ w))
    return -(jax.nn.one_hot(labels, w.shape[1], dtype=logs.dtype) * logs).sum(-1).mean()


def _smoothed(x: Any, w: Any, labels: Any) -> Any:
    ones = jax.nn.one_hot(labels, w.shape[1], dtype=jnp.promote_types(x.dtype, jnp.float32))
    return optax.softmax_cross_entropy(_wide(x @ w), optax.smooth_labels(ones, 0.1)).mean()


def _softmax(x: Any, w: Any, labels: Any) -> Any:
    return (jax.nn.softmax(_wide(x @ w)) * (1 + labels[..., None])).astype(x.dtype)


def _with_its_largest(x: Any, w: Any, labels: Any) -> Any:
    z = _wide(x @ w)
    return jax.nn.logsumexp(z, -1), jnp.max(z, -1), labels


PROGRAMS: dict[str, Callable[..., Any]] = {
    "with_numbers": _with_numbers,
    "picked": _picked,
    "mapped": _mapped,
    "indexed": _indexed,
    "with_ones": _with_ones,
    "smoothed": _smoothed,
    "softmax": _softmax,
    "with_its_largest": _with_its_largest,
}
LARGE = (SHAPE((8192, 2048), BF16), SHAPE((2048, 32768), BF16), SHAPE((8192,), jnp.int32))


def drawn() -> tuple[Any, ...]:
    """Returns operands; logits of a row differ by up to ten."""
    rng = np.random.default_rng(0)
    x, w = normal(rng, (2, 32, 64), BF16), normal(rng, (64, WORDS), BF16) * BF16(0.25)
    return x, w, jnp.asarray(rng.integers(0, WORDS, (2, 32)).astype(jnp.int32))


def trained(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of the results and of the gradients of x and w."""
    return lambda x, w, labels: step(lambda *own: f(*own, labels))(x, w)


def as_written(f: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function so that XLA rounds wherever the program does."""
    return jax.jit(f, compiler_options={"xla_allow_excess_precision": False})


@pytest.mark.parametrize("k", [2048, 4096])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_largest_and_the_sum_of_rows_are_the_kernels(name: str, k: int) -> None:
    f = PROGRAMS[name]
    # A derivative of the largest value counts who is as large: a pass over all stays, as in XLA.
    f = f if name == "with_its_largest" else trained(f)
    program, found = rewritten(f, SHAPE((8192, k), BF16), SHAPE((k, 32768), BF16), LARGE[2])
    assert {"reduce_max", "exp", "reduce_sum"} <= set(found[0].folded)
    # What is left of these passes is a reduction of one value for each row.
    large = [e for e in program.eqns if e.primitive.name == "reduce_max"]
    assert not any(e.invars[0].aval.size > LARGE[2].size for e in large)
    # Nothing is added to zeros of all words: a pass chooses what it reads.
    added = [e for e in program.eqns if e.primitive.name == "scatter-add"]
    assert not any(e.outvars[0].aval.size > LARGE[2].size for e in added)


def test_a_pass_that_stays_sums_exponentials_as_well() -> None:
    _, found = rewritten(trained(_with_its_largest), *LARGE)
    assert "exp" not in found[0].folded


@pytest.mark.every_other
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_as_good_as_the_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    args, f = drawn(), trained(PROGRAMS[name])
    program, found = rewritten(f, *args, implementation="interpret")
    assert {"reduce_max", "exp", "reduce_sum"} <= set(found[0].folded)
    expected = jax.tree.leaves(as_written(f)(*args))
    values = jax.tree.leaves(exact(lambda x, w: f(x, w, args[2]), args[:2]))
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), expected, values)


def test_gradients_of_sure_tokens_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    # If the sum were of other logits than those that are kept, they would not.
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    x, w, _ = drawn()
    x, w = x * BF16(8), w * BF16(8)
    labels = jnp.argmax(x @ w, -1)

    def total(x: Any, w: Any) -> Any:
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(_wide(x @ w), labels))

    program, found = rewritten(jax.grad(total), x, w, implementation="interpret")
    assert "exp" in found[0].folded
    (ours,), stock = jax.jit(core.jaxpr_as_fun(program))(x, w), as_written(jax.grad(total))(x, w)
    sure = jnp.abs(_wide(stock)).max(-1) == 0
    assert jnp.sum(sure) > 10
    assert jnp.abs(_wide(ours)).max(-1, where=sure[..., None], initial=0).max() == 0


def test_what_is_subtracted_depends_on_nothing_else_of_the_product() -> None:
    def f(x: Any, w: Any) -> Any:
        z = _wide(x @ w)
        less = jnp.max(z, -1, keepdims=True) + jnp.cumsum(z, -1)[..., :1]
        return jnp.sum(jnp.exp(z - less), -1)

    program, found = rewritten(f, *LARGE[:2])
    assert "exp" not in found[0].folded
    assert count(program, "pallas_gemm") + count(program, "pallas_gemm_fused") == 1


def test_losses_that_are_no_numbers_are_rewritten() -> None:
    # Some of what calls return is a number then.
    x, w, labels = drawn()

    def f(x: Any, w: Any) -> Any:
        return jax.grad(lambda x, w: jnp.nansum(_with_numbers(x, w, labels)), (0, 1))(x, w)

    program, _ = rewritten(f, x, w, implementation="interpret")
    assert count(program, "pallas_gemm") + count(program, "pallas_gemm_fused") >= 1


def test_labels_that_are_no_words_have_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    x, w, labels = drawn()
    labels = labels.at[0, :3].set(jnp.array([-1, WORDS, -WORDS - 1]))

    def losses(x: Any, w: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(_wide(x @ w), labels)

    program, found = rewritten(losses, x, w, labels, implementation="interpret")
    assert "exp" in found[0].folded
    (given,) = jax.jit(core.jaxpr_as_fun(program))(x, w, labels)
    assert np.isnan(given).sum() == 2
    np.testing.assert_allclose(given, as_written(losses)(x, w, labels), rtol=1e-5)


def test_labels_that_are_no_words_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    x, w, labels = drawn()
    labels = labels.at[0, :3].set(jnp.array([-1, WORDS, -WORDS - 1]))

    def gradients(x: Any, w: Any) -> Any:
        return jax.grad(_with_numbers, (0, 1))(x, w, labels)

    program, _ = rewritten(gradients, x, w, implementation="interpret")
    assert count(program, "scatter-add") <= 1
    expected = as_written(gradients)(x, w)
    for own, other in zip(jax.jit(core.jaxpr_as_fun(program))(x, w), expected, strict=True):
        np.testing.assert_allclose(_wide(own), _wide(other), atol=1e-3)


def test_rows_of_infinities_are_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    x, w, _ = drawn()
    masks = jnp.zeros((2, 32, 1), BF16).at[0, 0].set(-jnp.inf).at[0, 1].set(jnp.inf)

    def f(x: Any, w: Any, masks: Any) -> Any:
        return jax.nn.logsumexp(_wide(x @ w + masks), -1)

    program, found = rewritten(f, x, w, masks, implementation="interpret")
    assert "exp" in found[0].folded
    (given,) = jax.jit(core.jaxpr_as_fun(program))(x, w, masks)
    np.testing.assert_allclose(given, as_written(f)(x, w, masks), rtol=1e-5)
    assert np.isneginf(given[0, 0])
    assert np.isposinf(given[0, 1])


def test_derivatives_of_a_loss_are_the_programs() -> None:
    args = drawn()
    with target("h200"):
        found = jax.jit(trained(accelerate(_with_numbers)))(*args)
    expected = jax.jit(trained(_with_numbers))(*args)
    values = exact(lambda x, w: trained(_with_numbers)(x, w, args[2]), args[:2])
    _check(*map(jax.tree.leaves, (found, expected, values)))


def test_exact_leaves_sums_of_exponentials() -> None:
    program, found = rewritten(_with_its_largest, *LARGE, exact=True)
    assert "exp" not in found[0].folded
    assert count(program, "exp") == 1
