"""Programs compiled for eight GPUs: each runs kernels on its part, and what is sent is covered."""

from collections import Counter
from typing import Any

import pytest

from pallas_gemm import offline
from tests import programs

pytestmark = pytest.mark.skipif(
    bool(offline.missing_packages()), reason="needs the extra aot, which brings the compiler"
)


@pytest.fixture(scope="module")
def done() -> dict[str, Any]:
    """What each program does, by its name."""
    return programs.printed("tests.partitioned_programs")


def _kernels(program: Any) -> list[str]:
    return [result for name, result in program if name == "kernel"]


def _sent(program: Any) -> Counter[str]:
    """Counts messages; one that is sent and awaited in two steps is one."""
    names = (name.removesuffix("-start") for name, _ in program if not name.endswith("-done"))
    return Counter(name for name in names if name != "kernel")


@pytest.mark.parametrize("program", ["columns", "explicit", "given", "mapped"])
def test_rows_and_columns_need_nothing_of_the_others(done: dict[str, Any], program: str) -> None:
    assert done[program] == [["kernel", "bf16[2048,1024]"]]


def test_a_contracted_dimension_is_reduced_once_in_float32(done: dict[str, Any]) -> None:
    assert _kernels(done["contracted"]) == ["f32[2048,4096]"]
    assert _sent(done["contracted"]) == {"all-reduce": 1}


def test_a_training_step_gathers_nothing(done: dict[str, Any]) -> None:
    # Both layers and both gradients of each.
    assert len(_kernels(done["layers"])) == 6
    assert set(_sent(done["layers"])) == {"all-reduce"}


def test_messages_of_rings_travel_while_kernels_run(done: dict[str, Any]) -> None:
    under_way = covered = 0
    for name, _ in done["rings"]:
        if name.endswith("-start"):
            assert not under_way
            under_way, covered = 1, 0
        elif name.endswith("-done"):
            assert covered, done["rings"]
            under_way = 0
        else:
            assert name == "kernel"
            covered = 1
    # Four products for each gathered operand, and twice four halves for each that is scattered;
    # the gradients of the weights are one each.
    assert len(_kernels(done["rings"])) == 2 * (4 + 8) + 2
    # Three for each chunk or half of one; the rows for a gradient of weights are gathered again.
    assert _sent(done["rings"]) == {"collective-permute": 2 * (3 + 6), "all-gather": 1}


def test_what_a_device_computes_is_explained(done: dict[str, Any]) -> None:
    for part in (
        "hopper: m=2048 n=1024 k=4096 NN bfloat16 x bfloat16 -> bfloat16",
        "mesh          one device's part; the mesh splits m along x, n along y",
        "for           NVIDIA H200",
    ):
        assert part in done["explained"]
