"""Drawn programs of attention: what is drawn, what they compute, how a table is read again."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_bench as bench
from bench.command import RequestError

SMALL: dict[str, Any] = {"batch": 2, "queries": 6, "keys": 6, "heads": 2, "group": 3, "width": 4}


@pytest.fixture(autouse=True)
def _promotes_types() -> Iterator[None]:
    """JAX's attention promotes types as it does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def _one(layout: str, mask: str, **other: Any) -> bench.Attention:
    given = {"dtype": "float16", "gradient": False, "capped": False, "scores": "float32"}
    return bench.Attention(layout=layout, mask=mask, **(SMALL | given | other))


def _expected(one: bench.Attention, operands: list[Any]) -> Any:
    """Returns the result in float64, one head of queries after the other."""
    q, k, v, *read = (np.asarray(x, np.float64) for x in operands)
    if bench.LAYOUTS[one.layout].startswith("bng"):
        q, k, v = q.transpose(0, 3, 1, 2, 4), k.swapaxes(1, 2), v.swapaxes(1, 2)
    q = q.reshape(one.batch, one.queries, one.heads * one.group, one.width)
    out = np.zeros_like(q)
    far = np.subtract.outer(-np.arange(one.queries), -np.arange(one.keys))
    for b, head in np.ndindex(one.batch, one.heads * one.group):
        z = q[b, :, head] @ k[b, :, head // one.group].T / np.sqrt(one.width)
        z = 30 * np.tanh(z / 30) if one.capped else z
        hidden = np.zeros(z.shape, bool)
        match one.mask:
            case "causal":
                hidden = far > 0
            case "padded":
                hidden |= np.arange(one.keys) >= read[0][b]
            case "given":
                hidden = read[0][b, 0] == 0
            case "bias":
                z = z + read[0][0, head]
            case "alibi":
                z = z + read[0][head] * far
            case "segments":
                hidden = np.not_equal.outer(read[0][b], read[0][b])
        p = np.exp(z - z.max(-1, keepdims=True)) * ~hidden
        out[b, :, head] = p / p.sum(-1, keepdims=True) @ v[b, :, head // one.group]
    return out


@pytest.mark.parametrize("mask", bench.MASKS)
@pytest.mark.parametrize("layout", bench.LAYOUTS)
def test_programs_are_attention(layout: str, mask: str) -> None:
    one = _one(layout, mask, capped=not layout.startswith("jax") and mask == "bias")
    operands = bench.operands(one, 0)
    found = np.asarray(bench.made(one, is_ours=False, device="")(*operands), np.float64)
    if bench.LAYOUTS[layout].startswith("bng"):
        found = found.transpose(0, 3, 1, 2, 4)
    expected = _expected(one, operands)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=0.02, atol=0.01)


def test_gradients_are_those_of_queries_keys_and_values() -> None:
    one = _one("einsum", "padded", gradient=True)
    operands = bench.operands(one, 0)
    found = bench.made(one, is_ours=False, device="")(*operands)
    assert [x.shape for x in found] == [x.shape for x in operands[:3]]
    assert all(bool(jnp.any(x != 0)) for x in found)


def test_drawn_programs_fit_and_can_be_read_again(tmp_path: pathlib.Path) -> None:
    programs = bench.drawn(7, 60)
    assert programs == bench.drawn(7, 60)
    assert programs != bench.drawn(8, 60)
    assert {one.layout for one in programs} == set(bench.LAYOUTS)
    assert {one.mask for one in programs} == set(bench.MASKS)
    for one in programs:
        alone = one.queries * one.keys * one.heads * one.group
        assert one.batch == 1 or one.batch * alone <= bench.MOST_SCORES
    table = tmp_path / "drawn.csv"
    rows = [",".join(bench.Attention._fields), *(",".join(map(str, one)) for one in programs)]
    table.write_text("\n".join(rows))
    assert bench.read_rows(table) == programs


def test_other_tables_are_refused(tmp_path: pathlib.Path) -> None:
    table = tmp_path / "other.csv"
    table.write_text("size,us\n1,2\n")
    with pytest.raises(RequestError, match="is no table of this program: 'layout'"):
        bench.read_rows(table)
    with pytest.raises(RequestError, match="No such file"):
        bench.read_rows(tmp_path / "none.csv")


def test_ours_is_the_same_program_accelerated() -> None:
    one = _one("einsum of heads before tokens", "causal", dtype="bfloat16", group=1)
    large = one._replace(batch=4, heads=16, queries=2048, keys=2048, width=128)
    traced = jax.make_jaxpr(bench.made(large, is_ours=True, device="h200"))(*bench.shapes(large))
    assert "pallas_gemm_fused" in str(traced)
