"""Programs compiled for eight GPUs: each runs kernels on its part, and sends as little."""

import json
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import explain, gemm, offline, target
from tests import partitioned_programs, programs

pytestmark = pytest.mark.skipif(
    bool(offline.missing_packages()), reason="needs the extra aot, which brings the compiler"
)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """Lines of what the assembler says of each kernel, and a last one of what the programs do."""
    return programs.output(
        "tests.partitioned_programs", **{partitioned_programs.ASSEMBLED: "1"}
    ).splitlines()


@pytest.fixture(scope="module")
def done(printed: list[str]) -> dict[str, Any]:
    """What each program does, by its name."""
    return json.loads(printed[-1])


def _kernels(program: Any) -> list[str]:
    return [result for name, result in program if name == "kernel"]


def _sent(program: Any) -> Counter[str]:
    """Counts messages; one that is sent and awaited in two steps is one."""
    names = (name.removesuffix("-start") for name, _ in program if not name.endswith("-done"))
    return Counter(name for name in names if name != "kernel")


@pytest.mark.parametrize("program", ["columns", "explicit", "given", "mapped", "groups"])
def test_rows_and_columns_need_nothing_of_the_others(done: dict[str, Any], program: str) -> None:
    assert done[program] == [["kernel", "bf16[2048,1024]"]]


def test_a_contracted_dimension_is_reduced_once(done: dict[str, Any]) -> None:
    assert _kernels(done["contracted"]) == ["bf16[2048,4096]"]
    assert _sent(done["contracted"]) == {"all-reduce": 1}


@pytest.mark.parametrize("program", ["function", "explicit function"])
def test_each_device_runs_a_function_in_its_kernel(done: dict[str, Any], program: str) -> None:
    (kernel,) = _kernels(done[program])
    assert kernel.startswith("(bf16[2048,1024]")
    # Those of rows are added up over the columns' devices, and columns compared over the rows'.
    assert _sent(done[program]) == {"all-reduce": 2}


def test_whole_rows_of_a_function_need_nothing_of_the_others(done: dict[str, Any]) -> None:
    assert len(_kernels(done["function of rows"])) == 1
    assert _sent(done["function of rows"]) == {}


def test_each_device_quantizes_its_part_in_a_kernel(done: dict[str, Any]) -> None:
    (kernel,) = _kernels(done["quantized"])
    assert kernel.startswith("(f8e4m3fn[1,1024,1024]")
    assert _sent(done["quantized"]) == {}


def test_a_training_step_gathers_nothing(done: dict[str, Any]) -> None:
    # Both layers and both gradients of each.
    assert len(_kernels(done["layers"])) == 6
    assert set(_sent(done["layers"])) == {"all-reduce"}


def test_kernels_that_exchange_rows_leave_nothing_to_send(done: dict[str, Any]) -> None:
    """Forward: gathered, scattered and added up; the same backward, and two for the weights."""
    assert _sent(done["exchanging"]) == {}
    results = Counter(result.partition("[")[0] for result in _kernels(done["exchanging"]))
    assert results == {"(bf16": 2, "bf16": 6}


def test_nothing_spills_or_is_serialized(printed: list[str]) -> None:
    assembled = "\n".join(printed[:-1])
    assert "pallas_gemm_add_up" in assembled
    assert "serialized" not in assembled
    spilled = [line for line in printed if "spill" in line]
    assert len(spilled) >= 8
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spilled)


def test_sums_that_xla_scatters_are_sent_by_the_kernel(done: dict[str, Any]) -> None:
    assert _kernels(done["scattered"]) == ["bf16[4,1024,4096]", "bf16[2048,2048]"]
    assert _sent(done["scattered"]) == {}


def test_sums_of_integers_are_exact(done: dict[str, Any]) -> None:
    assert _kernels(done["integers"]) == ["s32[4,1024,4096]", "s32[2048,2048]"]
    assert _sent(done["integers"]) == {}


def test_what_is_sent_by_whom_is_explained(done: dict[str, Any]) -> None:
    sends = " ".join(done["sends"].split())
    assert "the mesh splits the rows along y; the kernel sends them" in sends
    refused = " ".join(done["refused"].split())
    assert "XLA's collective sends them: the rows of 4 devices, 2112 in all, are no" in refused


def test_the_config_that_is_explained_is_that_of_the_exchange(done: dict[str, Any]) -> None:
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 1024), (1024, 2560)))
    with target("h200"):
        assert "mirrored=True" in str(explain(gemm, *shapes))
    assert _kernels(done["narrow"])[0] == "bf16[4,512,2560]"
    assert "the kernel sends them" in " ".join(done["narrow explained"].split())
    assert "mirrored=False" in done["narrow explained"]


def test_what_a_device_computes_is_explained(done: dict[str, Any]) -> None:
    for part in (
        "hopper: m=2048 n=1024 k=4096 NN bfloat16 x bfloat16 -> bfloat16",
        "mesh          one device's part; the mesh splits m along x, n along y",
        "for           NVIDIA H200",
    ):
        assert part in done["explained"]
