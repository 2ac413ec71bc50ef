"""`numerics`: what is promised of the bits of products, and how their sums are made."""

import re
from contextlib import AbstractContextManager
from typing import Any, Literal

from pallas_gemm.api import bits
from pallas_gemm.api.explaining.explain import explain
from pallas_gemm.call import Numerics
from pallas_gemm.op.lowering import SUMS
from pallas_gemm.planning.numerics import STATED
from pallas_gemm.planning.sums import Sums
from pallas_gemm.planning.within import Within


class numerics(Numerics, Within):  # noqa: N801 - it is called as a function is
    """A promise about the bits of products: an argument of each, or a block around them.

    >>> promised = numerics(invariant="rows")
    >>> with target("h200"):
    ...     print(*numerics.of(gemm, x, w, numerics=promised))
    bfloat16 in float32, 1 steps of 64; rounded to bfloat16; a row keeps its bits among other rows

    `invariant="rows"`: the bits of a row depend on that row, on the right operand, and on what the
    epilogue takes for that row. They do not depend on how many rows there are or where it stands.
    Nor does it matter whether the product is under `vmap`, in a group, or split along a mesh.

    `invariant="run"`: the same program gives the same bits in every run. The config is free.

    Only kernels keep a promise. XLA computes no product of which something is promised: where no
    kernel takes it, an error says why.

    Gradients of left operands keep the promise of their product. Gradients of right operands are
    sums over rows. They are made in the order of the rows, in parts of `chunk` rows if that is
    given. So micro-batches of `chunk` rows that are added up in float32 make the bits of the whole.

    Args:
        invariant: "rows" or "run"; None takes back what a block around this one says.
        part: Elements of k in each part of a sum, instead of what `invariant` asks for. Parts are
            added up in float32, one after the other.
        chunk: Rows in each part of a sum over rows, the gradient of a right operand.

    Raises:
        ValueError: A value is not legal.
        TypeError: A number is no integer.
    """

    def __init__(
        self,
        invariant: Literal["rows", "run"] | None = "run",
        *,
        part: int | None = None,
        chunk: int | None = None,
    ) -> None:
        if invariant not in ("rows", "run", None):
            raise ValueError(f"invariant must be 'rows', 'run' or None, got {invariant!r}")
        for name, value in (("part", part), ("chunk", chunk)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"{name} must be an integer or None, got {value!r}")
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if invariant is None and (part, chunk) != (None, None):
            raise ValueError(
                "invariant=None takes back every promise, and part and chunk are some, got"
                f" part={part}, chunk={chunk}"
            )
        super().__init__(invariant, part, chunk)

    def _block(self) -> AbstractContextManager[Any]:
        """See `Within`: every product that is traced within keeps the promise, gradients too."""
        return STATED(self)

    @staticmethod
    def of(f: Any, *args: Any, **kwargs: Any) -> tuple[Sums, ...]:
        """Returns how the sums of each product of a function would be made.

        Args:
            f: A function.
            *args: Its arguments, as for `explain`.
            **kwargs: Its keyword arguments.
        """
        found = explain(f, *args, **kwargs)
        return tuple(Sums.of(entry.decision) for entry in found.entries if entry.is_ours)

    @staticmethod
    def carried(program: Any) -> tuple[str, ...]:
        """Returns what a program for a GPU says of the sums of which something is promised.

        >>> exported = jax.export.export(jax.jit(f), platforms=["cuda"])(x)  # doctest: +SKIP
        >>> print(*numerics.carried(exported))  # doctest: +SKIP
        bfloat16 in float32, 1 steps of 64; rounded to bfloat16; a row keeps its bits among ...

        Args:
            program: The result of `jax.export.export`, or of `jax.jit(f).lower`.

        Returns:
            Each record that a product of it has, as text and once.

        Raises:
            TypeError: It is no such program.
        """
        module = getattr(program, "mlir_module", None) or getattr(program, "as_text", None)
        if not callable(module):
            kind = type(program).__name__
            raise TypeError(f"program must be exported or lowered by JAX, got {kind}")
        found = re.findall(rf'{SUMS} = "([^"]*)"', module())
        return tuple(dict.fromkeys(found))

    check = staticmethod(bits.check)
