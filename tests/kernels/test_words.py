"""The words of an epilogue: how many places know each of them."""

import pathlib
import re

import pytest

import pallas_gemm
from pallas_gemm.call import DIMENSIONS, EXTRAS, Operands
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.problem import KINDS, Epilogue

# Files of the package that name an operand; the public functions and layers that take it count.
KNOWING = {"row_scale": 12, "up_bias": 10, "up_scale": 7, "col_scale": 14}


@pytest.mark.parametrize("name", KNOWING)
def test_no_more_files_know_an_operand(name: str) -> None:
    package = pathlib.Path(pallas_gemm.__file__).parent
    word = re.compile(rf"\b{name}\b")
    knowing = [path for path in package.rglob("*.py") if word.search(path.read_text())]
    assert len(knowing) <= KNOWING[name], knowing
    # Kernels know the program alone.
    assert not [path for path in knowing if {"hopper", "blackwell"} & {*path.parts}]


def test_each_record_has_the_operands_of_the_declaration() -> None:
    assert tuple(KINDS) == EXTRAS
    assert (*DIMENSIONS,) == Operands._fields
    fields = Epilogue.__dataclass_fields__.keys()
    assert fields >= KINDS.keys()
    assert Contraction.__dataclass_fields__.keys() >= KINDS.keys()
