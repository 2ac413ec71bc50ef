"""`accelerate`: how it is called, what it says, and that whatever goes wrong changes nothing."""

import dataclasses
import functools
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import AccelerateWarning, accelerate, explain, target
from pallas_gemm.rewriting.walk import Rewriter
from tests.reference import integers

N = 256


@pytest.fixture
def x() -> Any:
    """Small integers, of which products are exact."""
    return integers(np.random.default_rng(1), (N, N), jnp.bfloat16) // 2


def _same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def test_arguments_and_results_are_trees_and_anything(x: Any) -> None:
    def f(tree: Any, /, *, power: int, name: str, scale: Any = None) -> Any:
        assert isinstance(power, int)
        assert name == "f"
        assert scale is None
        for _ in range(power):
            tree = {"x": tree["x"] @ tree["w"], "w": tree["w"]}
        return tree, None, [tree["x"]]

    with target("h200"):
        found = accelerate(f)({"x": x, "w": -x}, power=2, name="f")
        traced = jax.jit(functools.partial(accelerate(f), power=2, name="f"))({"x": x, "w": -x})
    expected = f({"x": x, "w": -x}, power=2, name="f")
    for own in (found, traced):
        assert jax.tree.structure(own) == jax.tree.structure(expected)
        jax.tree.map(_same, own, expected)


def test_it_stands_for_the_function(x: Any) -> None:
    @accelerate
    def named(x: Any) -> Any:
        """Says so."""
        return x @ x

    assert (named.__name__, named.__doc__) == ("named", "Says so.")
    with target("h200"):
        text = jax.jit(named).lower(x).as_text()
        assert named(np.asarray(x)).dtype == jnp.bfloat16
    assert "dot_general" in text


def test_an_eager_call_is_compiled_once(x: Any) -> None:
    count = []

    def f(x: Any, scale: float) -> Any:
        count.append(scale)
        return x @ x * scale

    own = accelerate(f)
    with target("h200"):
        for scale in (0.0, -0.0, 0.0, -0.0):
            assert np.signbit(np.asarray(own(jnp.ones((N, N), jnp.bfloat16), scale))[0, 0]) == (
                str(scale) == "-0.0"
            )
    assert len(count) == 2


def test_without_a_gpu_the_function_is_called_as_it_is(x: Any) -> None:
    calls = []

    def f(x: Any) -> Any:
        calls.append(x)
        return x @ x

    accelerate(f)(x)
    assert calls == [x]


def test_a_program_without_products_is_as_it_was(x: Any) -> None:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return jnp.sin(x) + 1

    f.defjvp(lambda primals, tangents: (f(*primals), *tangents))
    with target("h200"):
        program = jax.make_jaxpr(accelerate(f))(x)
        mapped = jax.jit(jax.grad(lambda x: jnp.sum(accelerate(f)(x))))(x)
    assert str(program) == str(jax.make_jaxpr(f)(x))
    assert jnp.all(mapped == 1)


def test_it_can_be_turned_off(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any) -> Any:
        return x @ x

    assert accelerate(f, enabled=False) is f
    monkeypatch.setenv("PALLAS_GEMM_ACCELERATE", "0")
    assert accelerate(f) is f


def test_only_products_of_named_lines_are_replaced(x: Any) -> None:
    def f(x: Any) -> Any:
        y = x @ x
        return y @ x

    line = f.__code__.co_firstlineno + 2
    with target("h200"):
        for only, count in (
            (f"test_accelerate.py:{line}", 1),
            (["other.py", "test_accelerate.py"], 2),
            ("other.py", 0),
        ):
            found = explain(accelerate(f, only=only), x)
            assert len(found.products) == count


def test_the_report_is_one_line_the_first_time(x: Any) -> None:
    lines: list[str] = []

    def f(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return x @ x, wide.T @ wide, x.astype(jnp.int32) @ x

    own = accelerate(f, report=lines.append)
    with jax.numpy_dtype_promotion("standard"), target("h200"):
        own(x)
        own(x[:128, :128])
    (line,) = lines
    assert line.startswith("accelerate f: 1 of 3 products by our kernels, 2 left to XLA (")
    assert "XLA is predicted to take 4 us, and the kernel 5 us with what prepares operands" in line
    assert "no kernel takes operands of int32" in line


def test_explain_says_what_became_of_each_product(x: Any) -> None:
    def f(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: y @ x, x), x.astype(jnp.float32) @ x[0]

    with jax.numpy_dtype_promotion("standard"), target("h200"):
        found, stock = explain(accelerate(f), x), explain(f, x)
    assert found.rewritten is not None
    replaced, left = found.rewritten
    line = f"test_accelerate.py:{f.__code__.co_firstlineno + 1}"
    assert (replaced.place, replaced.why, replaced.times) == (line, None, 3)
    assert left.place == line
    assert left.why is not None
    assert "no kernel multiplies" in left.why
    assert "accelerated" in str(found)
    assert "left: no kernel multiplies" in str(found)
    assert f"3 products by a kernel, at {line}" in " ".join(str(found).split())
    assert stock.rewritten is None


def test_a_function_that_cannot_be_traced_runs(x: Any) -> None:
    def f(x: Any) -> Any:
        return x @ x if x[0, 0] > -99 else x

    own = accelerate(f)
    with target("h200"):
        with pytest.warns(AccelerateWarning, match="accelerate leaves f as it is: it cannot be"):
            _same(own(x), f(x))
        _same(own(x), f(x))


def test_a_function_that_changes_its_arguments_runs(x: Any) -> None:
    def f(state: dict[str, Any]) -> Any:
        state["x"] = state["x"] @ state["x"]
        return None

    state, expected = {"x": x}, {"x": x}
    f(expected)
    with target("h200"), pytest.warns(AccelerateWarning, match="changes its arguments in place"):
        accelerate(f)(state)
    _same(state["x"], expected["x"])


def test_what_goes_wrong_in_rewriting_changes_nothing(
    x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("lost")

    monkeypatch.setattr(Rewriter, "_inside", fail)
    own = accelerate(lambda x: x @ x)
    with target("h200"):
        with pytest.warns(AccelerateWarning, match="KeyError: 'lost'"):
            _same(own(x), x @ x)
        _same(jax.jit(own)(x), x @ x)


def test_an_error_of_the_function_is_its_own(x: Any) -> None:
    def f(x: Any) -> Any:
        raise ZeroDivisionError("the user's")

    with target("h200"), pytest.raises(ZeroDivisionError, match="the user's"):
        accelerate(f)(x)


def test_arrays_from_around_are_traced(x: Any) -> None:
    def outer(x: Any, w: Any) -> Any:
        return accelerate(lambda y: y @ w)(x)

    with target("h200"):
        _same(jax.jit(outer)(x, -x), x @ -x)
        gradient = jax.jit(jax.grad(lambda x, w: outer(x, w).astype(jnp.float32).sum(), 1))(x, x)
    _same(gradient, jnp.broadcast_to(x.astype(jnp.float32).sum(0)[:, None], (N, N)))


def test_an_object_with_arrays_is_an_argument(x: Any) -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: Any
        name: str = dataclasses.field(metadata={"static": True})

        def __call__(self, x: Any) -> Any:
            return x @ self.w

    with target("h200"):
        _same(accelerate(Layer.__call__)(Layer(x, "own"), x), x @ x)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"f": 3}, TypeError, "f must be a function, got int"),
        ({"numerics": "fast"}, ValueError, "numerics must be None or 'exact', got 'fast'"),
        ({"only": [3]}, TypeError, "only must be a name of a line or several"),
        ({"only": 3}, TypeError, "only must be a name of a line or several, .* got 3"),
        ({"report": 1}, TypeError, "report must be True, False or a function of a line, got 1"),
    ],
)
def test_what_is_not_legal_is_refused(how: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        accelerate(**{"f": jnp.sin, **how})


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_a_function_is_traced_and_as_ever_afterwards(
    collects: bool, x: Any
) -> None:
    seen = []

    def f(x: Any) -> Any:
        seen.append(gc.isenabled())
        return x @ x

    def failing(x: Any) -> Any:
        seen.append(gc.isenabled())
        raise ArithmeticError

    def traced(f: Any) -> None:
        jax.jit(accelerate(f)).trace(x)
        seen.append(gc.isenabled())

    if not collects:
        gc.disable()
    try:
        with target("h200"):
            traced(f)
            with pytest.raises(ArithmeticError):
                traced(failing)
    finally:
        gc.enable()
    # What fails is called again, as it is.
    assert seen == [False, collects, False, collects]
