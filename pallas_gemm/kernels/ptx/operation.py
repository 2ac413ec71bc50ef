"""An operation that Pallas has no word for, and what it means.

A block of PTX is a `Ptx`, which a kernel has as data. JAX's simulator runs none;
`tests/ptx_simulator.py` teaches it to, for those through which CTAs share words of global memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import vector

INT32 = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)
"""A number that all threads have."""
NUMBER = plgpu.Layout.WG_SPLAT
REF = plgpu.RefType()


class Plan(Protocol):
    """The plan of a kernel, as far as an operation has to know it."""

    @property
    def simulated(self) -> bool:
        """Whether the kernel runs in the simulator."""

    @property
    def shares_words(self) -> bool:
        """Whether CTAs may share words of global memory."""


class Operation:
    """A function that is called with a plan first, and is another one where that is simulated."""

    def __init__(self, on_gpu: Callable[..., Any]) -> None:
        self._on_gpu = on_gpu
        self._meaning: Callable[..., Any] | None = None
        self.__doc__ = on_gpu.__doc__

    def meaning(self, function: Callable[..., Any]) -> Self:
        """Adds what the operation means, in words that the simulator knows."""
        self._meaning = function
        return self

    def __call__(self, plan: Plan, *args: Any, **options: Any) -> Any:
        """Does it."""
        if not self._is_simulated(plan):
            return self._on_gpu(*args, **options)
        assert self._meaning is not None, "nothing simulated comes here"
        return self._meaning(*args, **options)

    def _is_simulated(self, plan: Plan) -> bool:
        return plan.simulated


def nothing(*_: Any, **__: Any) -> None:
    """The meaning of what the simulator needs not do."""


def as_it_is(x: Any, *_: Any) -> Any:
    """The meaning of what moves values between threads, of which the simulator has one."""
    return x


def assigned(target: Any, values: Any, *_: Any) -> None:
    """The meaning of a store."""
    target[...] = values


class BetweenCtas(Operation):
    """One on a word of global memory that CTAs share, which another may change at any time."""

    def _is_simulated(self, plan: Plan) -> bool:
        return not plan.shares_words


class Ptx(NamedTuple):
    """A block of PTX.

    Its operands are `$0`, `$1` and on: its results, then references, as pointers, then numbers.

    Attributes:
        text: The block.
        results: How many results it has, each 32 bits that all threads have.
        convergent: Whether the threads of a warp meet in it.
    """

    text: str
    results: int = 0
    convergent: bool = False

    def __call__(self, refs: Sequence[Any] = (), numbers: Sequence[Any] = ()) -> list[Any]:
        """Runs it; returns its results."""
        types = (*(REF,) * len(refs), *(NUMBER,) * len(numbers))
        inline = plgpu.inline_mgpu(arg_types=types, return_type=[INT32] * self.results)
        return inline(Emitted(self, len(refs)))(*refs, *numbers)


class Emitted(NamedTuple):
    """A block of PTX in a kernel.

    Attributes:
        ptx: The block.
        refs: How many references it is given.
    """

    ptx: Ptx
    refs: int

    def __call__(self, _: Any, *given: Any) -> list[Any]:
        """Emits it."""
        text, results, convergent = self.ptx
        int32 = utils.ir.IntegerType.get_signless(32)
        words: Any = utils.inline_ptx(
            text,
            *(utils.memref_ptr(ref) for ref in given[: self.refs]),
            *map(word_of, given[self.refs :]),
            result_types=[int32] * results or None,
            has_side_effects=True,
            convergent=convergent,
        )
        return [mgpu.FragmentedArray.splat(word, (), is_signed=True) for word in words or ()]


def emit(
    text: str, given: Sequence[Any], constraints: Sequence[str], results: int = 0
) -> Iterator[Any]:
    """Emits PTX whose first operands are its results, numbers of float32; returns their registers.

    Args:
        text: The PTX.
        given: The operands that follow.
        constraints: Their constraints. A number says which result takes the place of an operand.
        results: How many results there are.
    """
    llvm: Any = utils.llvm
    single = utils.ir.F32Type.get()
    void = utils.ir.Type.parse("!llvm.void")
    made = llvm.inline_asm(
        llvm.StructType.get_literal([single] * results) if results else void,
        list(given),
        text,
        ",".join([*["=f"] * results, *constraints]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return (llvm.extractvalue(single, made, [i]) for i in range(results))


def like(values: Any, registers: Any) -> Any:
    """The array of such registers that lies as another one does."""
    return mgpu.FragmentedArray(
        _registers=registers, _layout=values.layout, _is_signed=values.is_signed
    )


def word_of(value: Any) -> Any:
    """The register of a number that all threads have."""
    return value.registers.item()


def number_in(register: Any, place: int = 0) -> Any:
    """One of the numbers of a register."""
    return vector.extract(register, dynamic_position=[], static_position=[place])


def address_of(ref: Any) -> Any:
    """The register of where something lies in shared memory."""
    word = utils.ir.IntegerType.get_signless(32)
    return utils.llvm.ptrtoint(word, utils.memref_ptr(ref))
