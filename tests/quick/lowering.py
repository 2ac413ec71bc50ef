"""Lets JAX lower a kernel in two thirds of the time, to the same module.

To sort the places of a kernel whose layouts it infers, it prints the operation of each, and numbers
all values of the kernel for each. And it reads each layout anew wherever an attribute holds it.
"""

from collections.abc import Callable
from typing import Any

import pytest
from jax.experimental.mosaic.gpu import layout_inference, layouts
from jaxlib.mlir import ir


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the slow parts for as long as the patch lasts."""
    _number_operations(monkeypatch)
    name = "_from_tiled_layout_attr"
    monkeypatch.setattr(layouts, name, _read_once(getattr(layouts, name)))


def _number_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorts places by where their operations come in the module, and prints none."""
    stock_infer, stock_name = layout_inference.infer_layout, layout_inference.ValueSite.__str__
    numbers: dict[Any, int] = {}

    def infer(module: ir.Module, **options: Any) -> None:
        def number(operation: ir.Operation) -> ir.WalkResult:
            numbers[operation.opview] = len(numbers)
            return ir.WalkResult.ADVANCE

        module.operation.walk(number, ir.WalkOrder.PRE_ORDER)
        try:
            stock_infer(module, **options)
        finally:
            numbers.clear()

    def name(site: layout_inference.ValueSite) -> str:
        number = numbers.get(site.operation)
        return stock_name(site) if number is None else f"{number}:{site.type}-{site.index}"

    monkeypatch.setattr(layout_inference, "infer_layout", infer)
    monkeypatch.setattr(layout_inference.ValueSite, "__str__", name)


def _read_once(stock: Callable[[ir.Attribute], Any]) -> Callable[[ir.Attribute], Any]:
    """Returns a function that knows the layouts it has read: few, and unchangeable."""
    layout_of: dict[str, Any] = {}

    def read(attribute: ir.Attribute) -> Any:
        text = str(attribute)
        if text not in layout_of:
            layout_of[text] = stock(attribute)
        return layout_of[text]

    return read
