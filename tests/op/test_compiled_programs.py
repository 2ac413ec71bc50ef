"""What surrounds the kernels in programs compiled for a GPU: nothing that need not be there."""

from typing import Any

import pytest

from pallas_gemm import offline
from tests import programs

pytestmark = pytest.mark.skipif(
    bool(offline.missing_packages()), reason="needs the extra aot, which brings the compiler"
)


@pytest.fixture(scope="module")
def printed() -> dict[str, dict[str, Any]]:
    """What the program prints."""
    return programs.printed("tests.compiled_programs")


@pytest.fixture(scope="module")
def contents(printed: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What each program consists of, by its name."""
    return printed["contents"]


@pytest.mark.parametrize(
    ("program", "kernels", "passes"),
    [
        ("plain", 1, 0),
        ("sequence", 1, 0),
        ("fused", 1, 0),
        ("gated", 1, 0),
        ("mapped", 1, 0),
        ("ensemble of one input", 1, 0),
        ("one layer with biases", 1, 0),
        ("attention output", 1, 0),
        # Both operands are padded; the kernel stores the result as it is.
        ("unaligned", 1, 2),
        # Forward, and both gradients from operands as they are stored.
        ("training step", 3, 0),
        # The derivative of the activation, and the sum for the gradient of the bias.
        ("training step of a layer", 3, 2),
        # Gate and up at once, the gradient of the inputs from both, and one of each weight; the
        # derivative of the activation.
        ("training step of a gated layer", 4, 1),
        ("training step of projections", 3 + 1 + 3, 0),
        # One contraction over all examples; the cotangent is made of a constant.
        ("examples", 1, 1),
        # The kernel finds its tiles from the sizes itself.
        ("groups", 1, 0),
    ],
)
def test_only_what_is_needed(
    contents: dict[str, dict[str, int]], program: str, kernels: int, passes: int
) -> None:
    found = contents[program]
    others = {name: count for name, count in found.items() if name != "kernel"}
    assert found["kernel"] == kernels
    assert sum(others.values()) == passes, others


def test_a_policy_keeps_kernels_from_running_twice(contents: dict[str, dict[str, int]]) -> None:
    # Two layers forward; backward two gradients for each but no product again.
    assert contents["checkpoint"]["kernel"] == 2 + 4


@pytest.mark.parametrize(
    ("program", "in_place"),
    [
        # Whole rows are a multiple of 256 bytes, and so is where a part of them begins.
        ("rows", ["slice"]),
        ("weights", ["dynamic-slice"]),
        ("results", ["dynamic-slice", "dynamic-update-slice"]),
        # Elsewhere a kernel would refuse, when it is run, an array that begins anywhere.
        ("odd rows", []),
        ("odd results", []),
        ("one row", []),
        ("one column", []),
        ("bias", []),
    ],
)
def test_a_kernel_is_handed_parts_of_arrays_only_where_they_are_aligned(
    printed: dict[str, dict[str, Any]], program: str, in_place: list[str]
) -> None:
    assert printed["views"][program] == in_place


def test_groups_take_no_memory_of_their_own(printed: dict[str, Any]) -> None:
    # The tables, which are computed from their sizes; a dense expansion takes several times what
    # operands and results do.
    assert 0 < printed["memory"] < 0.001


@pytest.mark.parametrize(
    ("program", "megabytes"),
    [
        # Tiles leave two numbers of each token, or of half of the tokens at a time.
        ("wide", 50),
        ("long", 50),
        # The slopes of a chunk, and the gradient of the tokens in float32.
        ("wide, with gradients", 250),
        ("long, with gradients", 250),
    ],
)
def test_losses_take_little_memory(printed: dict[str, Any], program: str, megabytes: float) -> None:
    assert printed["losses"][program] < megabytes


def test_a_chunk_of_words_has_few_kernels(printed: dict[str, Any]) -> None:
    # Three products, the slopes of logits that wait, labels, numbers of words, and two counters.
    assert printed["rounds"] == 8


TABLES = 1024
"""Bytes of tables and of numbers that XLA keeps."""


@pytest.mark.parametrize("program", ["gram", "values", "attention's gradients", "logits"])
def test_nothing_is_made_beside_products_that_stock_does_not_make(
    printed: dict[str, Any], program: str
) -> None:
    (memory, turned), (most_memory, most_turned) = printed["beside stock"][program]
    assert memory <= most_memory + TABLES
    assert turned <= most_turned
