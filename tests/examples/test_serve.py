"""The example that serves: it decodes alike whoever multiplies, as well as its bits can."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from examples import serve
from examples.decoder import OURS, STOCK, Sizes, decode, empty_cache, logits_of, parameters, read

SMALL = Sizes(blocks=1, width=32, heads=4, kv_heads=2, head=8, hidden=64, vocabulary=64)


def test_fewer_bits_take_less_and_err_more() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    asked = serve.Request(examples=2, prompt=5, tokens=3, group=16, rounds=1)
    with jax.numpy_dtype_promotion("standard"):
        found = serve.run(SMALL, asked, console)
    assert "No GPU" in console.export_text()
    errors = [own["error"] for own in found.values()]
    sizes = [own["gigabytes"] for own in found.values()]
    assert len(found) == 6
    # Of the same weights, both have as much and err alike; of fewer bits, less memory and more.
    assert sizes[::2] == sizes[1::2]
    assert sizes[0] > sizes[2] > sizes[4]
    assert all(abs(a - b) < 0.5 * b for a, b in zip(errors[::2], errors[1::2], strict=True))
    assert errors[0] < errors[2] < errors[4] < 0.5
    assert all(own["seconds"] > 0 for own in found.values())


def test_the_cache_holds_what_was_read() -> None:
    params = jax.jit(functools.partial(parameters, SMALL, dtype=jnp.float32))(jax.random.key(0))
    prompt = jax.random.randint(jax.random.key(1), (2, 7), 0, SMALL.vocabulary)
    with jax.numpy_dtype_promotion("standard"):
        logits, cache = jax.jit(functools.partial(read, OURS, SMALL, 10))(params, prompt)
        tokens = jax.jit(functools.partial(decode, STOCK, SMALL, 3))(params, logits, cache)
        # Without a cache: all tokens are read anew for each that follows.
        for i in range(3):
            whole = jnp.concatenate([prompt, tokens[:, :i]], axis=1)
            empty = empty_cache(SMALL, 2, 10, jnp.float32)
            anew, _ = logits_of(STOCK, SMALL, params, whole, empty, 0)
            np.testing.assert_array_equal(tokens[:, i], jnp.argmax(anew, axis=-1))


def test_it_explains_each_product_without_running_it() -> None:
    asked = serve.Request(examples=1, prompt=4, tokens=2, group=16)
    with jax.numpy_dtype_promotion("standard"):
        text = str(serve.explained(SMALL, asked))
    assert "1 x 64 x 32" in text
