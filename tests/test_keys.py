"""Whatever something is kept by tells apart all that it depends on: each field of each record.

The changes are made of the fields that the records have (`changes.py`). A field that a key leaves
out stands here with the reason.
"""

import dataclasses
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import gated_gemm, gemm, gram, grouped_gemm, offline, ragged_dot_general
from pallas_gemm.api import precompile as api_precompile
from pallas_gemm.call import Call, Numerics, Options
from pallas_gemm.computer import versions
from pallas_gemm.computer.user_folder import FOLDER_VARIABLE
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import H200
from pallas_gemm.kernels.blackwell.config import BlackwellConfig
from pallas_gemm.kernels.exchange import Exchange
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.op import contraction, kept_kernels
from pallas_gemm.op.mesh import parts
from pallas_gemm.planning import tables
from pallas_gemm.planning.by_xla import xla_groups
from pallas_gemm.planning.tables import Entry, Key, Table
from pallas_gemm.problem import Epilogue, Problem
from schedules import build, split_k
from tests import compilations
from tests.changes import changes

INSTEAD: Mapping[str, Any] = {
    ".activation": jnp.tanh,
    ".config": HopperConfig(),
    ".schedule": "hilbert",
    ".target": H200,
    ".reduced": np.dtype(np.float32),
    ".numerics": Numerics("rows"),
    ".residual_dtype": np.dtype(np.float32),
    ".kept": (1, 1),
    ".permutation": (0,),
    ".otherwise": types.SimpleNamespace(realigned=1, config=1),
    # Numbers that are operands, and what is not there.
    "": 2,
}
"""What fields hold that are None."""
SHAPE = jax.ShapeDtypeStruct
A, B = SHAPE((1024, 512), jnp.bfloat16), SHAPE((1024, 512), jnp.bfloat16)
SINGLE = SHAPE((8192, 8192), jnp.float32)
GROUPS = SHAPE((4, 1024, 512), jnp.bfloat16)
SIZES = SHAPE((4,), jnp.int32)
BIAS, RESIDUAL = SHAPE((1024,), jnp.float32), SHAPE((1024, 1024), jnp.bfloat16)


def _with_everything(a: Any, b: Any, bias: Any, residual: Any) -> jax.Array:
    extras: Any = {"bias": bias, "residual": residual, "activation": "gelu", "alpha": 0.5}
    return gemm(a, b, transpose_b=True, **extras, beta=2)


def _sums(a: Any, b: Any, sizes: Any) -> jax.Array:
    return ragged_dot_general(a, b, sizes, xla_groups.CONTRACTED)


PRODUCTS: Mapping[str, Any] = {
    "plain": (lambda a, b: gemm(a, b, transpose_b=True), A, B),
    "with everything": (_with_everything, A, B, BIAS, RESIDUAL),
    "gated": (lambda a, b, up: gated_gemm(a, b, up, transpose_b=True), A, B, B),
    "groups": (lambda a, b, sizes: grouped_gemm(a, b, sizes, transpose_b=True), A, GROUPS, SIZES),
    "sums over groups": (_sums, A, A, SIZES),
    "symmetric": (gram, A),
    "by halves": (gemm, SINGLE, SINGLE),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> list[Any]:
    """What kernels were asked for, of which none is lowered."""
    found: list[Any] = []

    def noted(ctx: Any, operands: Any, kernel: Any, signature: Any) -> Any:
        found.append((*kernel, signature))
        raise KeyboardInterrupt

    monkeypatch.setattr(kept_kernels, "lower", noted)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return found


NOT_IN_A_KERNEL = {
    "call.options": "the plan is what came of them",
    "decision.implementation": "the plan has the architecture",
    "decision.problem": "the call and the operands have it",
    "decision.reason": "it is for people",
    "decision.refused": "it is for people",
    "decision.mesh": "it is for people",
    "decision.plan.source": "it is for people",
    "decision.plan.seconds": "it is for people",
    "decision.plan.over_xla": "it is for people",
    **{
        f"decision.plan.otherwise.{name}": "as in the plan itself"
        for name in ("architecture", "device", "source", "seconds", "over_xla", "otherwise")
    },
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_kept_kernel_is_filed_under_all_that_makes_it(name: str, asked: list[Any]) -> None:
    f, *operands = PRODUCTS[name]
    with pallas_gemm.target("h200"), pytest.raises(KeyboardInterrupt):
        jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))
    ((call, decision, signature),) = asked

    def filed(call: Any, decision: Any, signature: Any) -> Any:
        return kept_kernels._path(kept_kernels.Product(call, decision), signature, "settings")

    whole = {"call": call, "decision": decision, "signature": signature}
    before, paths = filed(**whole), set()
    assert before == filed(**whole)
    for argument, value in whole.items():
        for path, changed in changes(value, INSTEAD, argument):
            if path.startswith(tuple(NOT_IN_A_KERNEL)):
                continue
            assert changed != value, path
            now = filed(**whole | {argument: changed})
            # Under which the kernel of what a caller's function computes is kept nowhere.
            assert now != before, path
            paths.add(path)
    assert {"call.precision[0]", "decision.plan.device.kind", "signature[0][0][0]"} <= paths


def test_a_kept_kernel_is_filed_under_what_jax_reads(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pallas_gemm.target("h200"), pytest.raises(KeyboardInterrupt):
        jax.jit(gemm).trace(A, SHAPE((512, 1024), A.dtype)).lower(lowering_platforms=("cuda",))
    ((call, decision, signature),) = asked

    def filed(settings: str | None = None) -> Any:
        product = kept_kernels.Product(call, decision)
        return kept_kernels._path(product, signature, settings or kept_kernels._settings())

    found = [filed()]
    known = {name: getattr(jax.config, name, None) for name in kept_kernels.SETTINGS}
    for name in known:
        with monkeypatch.context() as patch:
            config = types.SimpleNamespace(**known | {name: "another"})
            patch.setattr(kept_kernels, "jax", types.SimpleNamespace(config=config))
            settings = kept_kernels._settings()
        found.append(filed(settings))
    for variable in ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_LINE_INFO"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            found.append(filed())
    with monkeypatch.context() as patch:
        patch.setattr(kept_kernels, "get_default_device", lambda: H200)
        found.append(filed())
    with monkeypatch.context() as patch:
        patch.setattr(versions, "of_sources", lambda *_: "another")
        found.append(filed())
    assert len(set(found)) == len(found) > 6


def test_versions_tell_sources_and_releases_apart(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_ROOT", tmp_path)

    def version() -> str:
        versions.of_sources.cache_clear()
        return versions.of_sources("package/**/*.py", "other/*.py")

    found = [version()]
    for name in ("package/a.py", "package/inside/b.py", "other/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
        found.append(version())
    (tmp_path / "package/a.py").write_text("two")
    found.append(version())
    (tmp_path / "package/a.py").rename(tmp_path / "package/c.py")
    found.append(version())
    for module in ("jax", "jaxlib"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(versions, module), "__version__", "0.0.0")
            found.append(version())
    versions.of_sources.cache_clear()
    assert len(set(found)) == len(found)
    (tmp_path / "elsewhere.py").write_text("three")
    assert version() == found[5]
    versions.of_sources.cache_clear()


PROBLEM = Problem(1024, 512, 256, epilogue=Epilogue(bias=True, activation=jax.nn.relu))
NOT_TUNED_APART = {
    ".epilogue.alpha": "a number takes no time",
    ".epilogue.beta": "a number takes no time",
    ".epilogue.activation": "that there is one counts",
    ".epilogue.program": "functions are not tuned",
    ".epilogue.row_scale": "it takes next to no time",
    ".epilogue.col_scale": "it takes next to no time",
    ".epilogue.up_scale": "it takes next to no time",
    ".epilogue.up_bias": "it takes next to no time",
    ".epilogue.row_blocks": "the problem has the blocks",
    ".epilogue.col_blocks": "the problem has the blocks",
    ".epilogue.up_blocks": "the problem has the blocks",
    ".epilogue.col_zeros": "the problem has the blocks",
    ".epilogue.up_zeros": "the problem has the blocks",
    ".transpose_out": "a kernel's own view of a problem",
    ".kept": "a few rows and columns",
    ".terms": "they take the same steps",
    ".arrays": "operands that are split are not tuned",
    ".shift": "operands that are split are not tuned",
    ".longest_sum": "operands that are split are not tuned",
    ".shared_a": "it takes the same steps",
    ".shared_b": "it takes the same steps",
    ".groups": "groups are not tuned",
    ".ragged_k": "groups are not tuned",
}


def test_a_tuned_config_is_filed_under_the_problem() -> None:
    left_out = set()
    for path, problem in changes(PROBLEM, INSTEAD):
        if Key.of(problem) == Key.of(PROBLEM):
            left_out.add(path.partition("[")[0])
    assert left_out == set(NOT_TUNED_APART)


def test_a_problem_in_groups_is_looked_up_in_no_table() -> None:
    f, *operands = PRODUCTS["groups"]
    with pallas_gemm.target("h200"), tables.recording() as record:
        pallas_gemm.explain(f, *operands)
        assert not record.problems
        f, *operands = PRODUCTS["plain"]
        pallas_gemm.explain(f, *operands)
        assert len(record.problems) == 1


@pytest.mark.parametrize(
    "config", [HopperConfig(), BlackwellConfig()], ids=lambda c: type(c).__name__
)
def test_each_field_of_a_config_comes_back_from_a_table(config: GemmConfig) -> None:
    texts = set()
    for path, changed in changes(config, INSTEAD):
        before = Table.of(H200.kind, {Key.of(PROBLEM): Entry(changed)})
        texts.add(before.dumps())
        try:
            after = Table.loads(before.dumps())
        except tables.TableError:
            # The change was none that is legal.
            continue
        assert after == before, path
    assert len(texts) == len(list(changes(config, INSTEAD)))


CALL = Call(jnp.bfloat16, precision=(jax.lax.Precision.DEFAULT,) * 2, options=Options(target=H200))
SIGNATURE = (((64, 64), np.dtype(jnp.bfloat16)),) * 2


def test_a_product_of_a_mesh_is_named_by_all_that_the_compiler_does_not_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def name(call: Call, signature: Any = SIGNATURE) -> str:
        dims = contraction.of_matrices(call, *(len(shape) for shape, _ in signature))
        return parts._digest(parts._formula(dims.by_xla, call, signature))

    found = {"": name(CALL)}
    for field in ("options", "precision", "transpose_a", "transpose_b", "out_dtype"):
        for path, changed in changes(getattr(CALL, field), INSTEAD, field):
            if path != "precision[:]":
                found[path] = name(dataclasses.replace(CALL, **{field: changed}))
    for i, epilogue in enumerate(
        (Epilogue(0.5), Epilogue(activation=jnp.tanh), Epilogue(activation=jnp.sin))
    ):
        found[f"epilogue {i}"] = name(dataclasses.replace(CALL, epilogue=epilogue))
    found["shape"] = name(CALL, (SIGNATURE[0], ((64, 65), np.dtype(jnp.bfloat16))))
    found["dtype"] = name(CALL, (SIGNATURE[0], ((64, 64), np.dtype(jnp.float16))))
    monkeypatch.setattr(parts, "__version__", "0.0.0")
    found["version"] = name(CALL)
    assert len(set(found.values())) == len(found)


RECORDS = [
    CALL,
    PROBLEM,
    H200,
    HopperConfig(),
    BlackwellConfig(),
    contraction.of_matrices(CALL, 2, 2),
    Exchange((("x", 2), ("y", 4)), ("x",), gathers=True),
    Key.of(PROBLEM),
    api_precompile._Product(PROBLEM, PROBLEM.epilogue, {"alpha": 0.5}),
    Table.of(H200.kind, {Key.of(PROBLEM): Entry(HopperConfig(), 1e-5, 1.5)}),
]
"""By which caches of one process, and of JAX, keep what they made."""


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_that_differ_in_anything_are_not_equal(record: Any) -> None:
    for path, changed in changes(record, INSTEAD):
        assert changed != record, path
        assert {record: 1}.get(changed) is None, path


def test_orders_that_differ_in_anything_are_not_equal() -> None:
    orders = [build(name, 4, 6) for name in ("raster:rows", "raster:cols", "hilbert")]
    orders += [build("raster:rows", 6, 4)]
    pieces = [
        split_k(order, 6, parts, last) for order in orders for parts, last in ((2, None), (3, 2))
    ]
    pieces += [split_k(orders[0], 7, 2)]
    every = [*orders, *pieces]
    assert len(set(every)) == len(every)
    assert len({build("raster:rows", 4, 6), orders[0]}) == 1
    assert len({split_k(orders[0], 6, 2), pieces[0]}) == 1


def test_a_kept_compilation_is_filed_under_all_that_the_compiler_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    found = [compilations.digest("module", "h200")]
    found += [compilations.digest("other", "h200"), compilations.digest("module", "b200")]
    version = compilations._version
    for package in compilations.COMPILERS:
        with monkeypatch.context() as patch:
            patch.setattr(
                compilations, "_version", lambda x, own=package: "0" if x == own else version(x)
            )
            found.append(compilations.digest("module", "h200"))
    for prefix in compilations.SETTINGS:
        with monkeypatch.context() as patch:
            patch.setenv(f"{prefix}OF_A_TEST", "1")
            found.append(compilations.digest("module", "h200"))
    with monkeypatch.context() as patch:
        patch.setattr(offline, "described", lambda _: "another GPU")
        found.append(compilations.digest("module", "h200"))
    with monkeypatch.context() as patch:
        (tmp_path / "offline.py").write_text("another")
        patch.setattr(offline, "__file__", str(tmp_path / "offline.py"))
        found.append(compilations.digest("module", "h200"))
    assert len(set(found)) == len(found)
    # No byte moves from one part to the next unseen.
    assert compilations.digest_of([b"a", b"bc"]) != compilations.digest_of([b"ab", b"c"])
