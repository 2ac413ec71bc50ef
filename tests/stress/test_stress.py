"""The attack itself: that it draws what it says, and that nothing wrong gets past it."""

import argparse
import collections
import dataclasses
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm.proving import memcheck
from tests.reference import Formula
from tests.stress import cases, check, processes, products

# As on a GPU, but for who computes: all that is not the kernel's can be tested here.
BY_XLA = dataclasses.replace(cases.GPU, implementation="xla")
PLAIN = cases.Case("plain", 0, (40, 56, 24), cases.TYPES[0], Formula())


def test_a_case_is_its_seed_and_its_index() -> None:
    drawn = [cases.draw(7, index, cases.GPU) for index in range(40)]
    assert drawn[:4] == [cases.draw(7, index, cases.GPU) for index in range(4)]
    assert len(set(map(str, drawn))) == 40
    assert {case.kind for case in drawn} == set(cases.KINDS)
    assert any(0 in case.sizes for case in drawn)
    assert any(case.config is not None for case in drawn)


def test_the_shares_of_the_kinds_are_whole() -> None:
    for scale in (cases.GPU, cases.SIMULATED):
        assert sum(scale.kinds.values()) == pytest.approx(1)
    assert cases.GPU.kinds["real"] * 5000 == pytest.approx(600)


@pytest.mark.parametrize("banded", [False, True])
@pytest.mark.parametrize("kind", [*cases.KINDS])
def test_what_xla_computes_passes(kind: str, banded: bool) -> None:
    formula = Formula(transpose_b=True, activation="relu")
    case = dataclasses.replace(PLAIN, kind=kind, banded=banded, formula=formula)
    if kind != "gated":
        case = dataclasses.replace(case, bias=True, residual=True)
    if kind == "mapped":
        case = dataclasses.replace(case, batch=3)
    check.check(case, BY_XLA)


def _broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[jax.Array], jax.Array]) -> None:
    right = pallas_gemm.gemm
    monkeypatch.setattr(pallas_gemm, "gemm", lambda *args, **kwargs: change(right(*args, **kwargs)))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda x: x.at[39, 55].add(1), "plain"),
        (lambda x: x.at[0, 0].set(jnp.nan), "plain"),
        (lambda x: x.astype(jnp.float32), "plain"),
        (lambda x: x[:39], "plain"),
        (lambda x: x * 1.01, "real"),
        (lambda x: 2 * x, "gradient"),
    ],
    ids=["element", "nan", "type", "shape", "real", "gradient"],
)
def test_what_is_wrong_is_found(
    change: Callable[[jax.Array], jax.Array], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(PLAIN, kind=kind)
    if kind == "real":
        # The rule compares with the right product.
        right = pallas_gemm.gemm
        ours = dataclasses.replace(BY_XLA, implementation=None)
        monkeypatch.setattr(
            pallas_gemm,
            "gemm",
            lambda *args, implementation=None, **kwargs: (
                right(*args, **kwargs) if implementation else change(right(*args, **kwargs))
            ),
        )
        with pytest.raises(check.WrongResultError):
            check.check(case, ours)
        return
    _broken(monkeypatch, change)
    with pytest.raises(check.WrongResultError):
        check.check(case, BY_XLA)


def test_other_bits_in_a_second_run_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(range(9))

    def count() -> np.ndarray:
        # Of a NaN-free type the sign of a zero shows in no comparison of numbers.
        return np.asarray(-0.0 if next(runs) else 0.0, jnp.bfloat16)

    def change(x: jax.Array) -> jax.Array:
        sign = jax.pure_callback(count, jax.ShapeDtypeStruct((), jnp.bfloat16))
        return jnp.where(x == 0, sign, x)

    _broken(monkeypatch, change)
    with pytest.raises(check.WrongResultError, match="other bits"):
        check.check(PLAIN, BY_XLA)


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        ("print('{\"begins\": 0}'); import os; os.abort()", "the process ended -6"),
        ("print('{\"begins\": 0}', flush=True); import time; time.sleep(60)", "said nothing"),
        ("raise SystemExit('no GPU')", "no GPU"),
    ],
    ids=["dies", "hangs", "does-not-start"],
)
def test_a_process_that_ends_is_one_failure_with_its_command(
    script: str, wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "module", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(products, "PATIENCE", {"gpu": 3})
    own = argparse.Namespace(
        count=1, start=0, seed=0, workers=1, platform="gpu", until=time.time() + 60
    )
    count = products.Count()
    products.supervise(own, 0, count, threading.Lock())
    (failure,) = count.failures
    assert wrong in failure
    assert failure.endswith("--platform=gpu --seed=0 --start=0 --count=1 --workers=1")
    assert failure in capsys.readouterr().out


def test_racecheck_is_asked_for_all_that_it_finds() -> None:
    asked = " ".join(memcheck.flags("racecheck"))
    assert "--racecheck-report all --kernel-regex kns=pallas_gemm" in asked
    assert not any("report" in flag for flag in memcheck.flags("memcheck"))


def test_a_tool_that_breaks_off_has_no_verdict() -> None:
    sound = "computed\n========= ERROR SUMMARY: 0 errors\n"
    raced = "computed\n========= Race reported\n========= RACECHECK SUMMARY: 1 hazard displayed\n"
    given = {
        (0, sound): "sound",
        (memcheck.FOUND, raced): "FOUND",
        (0, raced): "FOUND",
        (1, sound.replace("computed", "")): "FAILED",
        (1, "========= Device not supported"): "no verdict",
        (-11, "computed"): "no verdict",
        (11, sound): "no verdict",
        (11, sound.replace("computed", "")): "FAILED",
        (1, sound): "FAILED",
    }
    found = collections.Counter()
    for (code, said), expected in given.items():
        assert memcheck.verdict(code, said, "computed")[0] == expected
        found[expected] += 1
    assert len(found) == 4
