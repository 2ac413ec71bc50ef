"""Records of what `explain` finds: products, copies, passes over memory, and times."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.export import is_symbolic_dim

from pallas_gemm.api.explaining.passes import Pass
from pallas_gemm.device import Device
from pallas_gemm.planning import prediction
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.planning.plans import Plan
from pallas_gemm.rewriting.walk import Found

UNKNOWN = "an unknown line"
"""Where a product is asked for that no line of the caller's program makes itself."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The line that asks for a product.

    Attributes:
        place: The line of the program, such as "model.py:41"; None if it is not known.
        gradient: It is a part of a derivative in reverse mode.
    """

    place: str | None = None
    gradient: bool = False


@dataclasses.dataclass(frozen=True)
class Copy:
    """A pass over memory beside a product: before it, or for the rest of its epilogue.

    Attributes:
        what: The operation, and its array.
        bytes: Bytes read and written, each time.
        times: How often it is made.
        is_epilogue: It is the rest of an epilogue, and no copy that another layout would save.
    """

    what: str
    bytes: int
    times: int = 1
    is_epilogue: bool = False

    def __str__(self) -> str:
        often = f", {self.times} times" if self.times > 1 else ""
        return f"{self.what}: moves {self.bytes / 1e6:.1f} MB{often}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A product of a program.

    Attributes:
        decision: The implementation that computes it, or would if it were asked of this package.
        by_xla: Seconds that XLA is predicted to take; None if nobody knows.
        origin: The line that asks for it.
        times: How often it runs.
        is_ours: It is asked of this package.
        is_outside: So it is, and XLA computes it without a look at the kernels.
    """

    decision: Decision
    by_xla: float | None = None
    origin: Origin = Origin()
    times: int = 1
    is_ours: bool = True
    is_outside: bool = False

    @property
    def by_kernel(self) -> float | None:
        """Seconds that the kernel is predicted to take; None if none computes it."""
        plan = self.decision.plan
        return None if plan is None else plan.seconds

    @property
    def if_asked(self) -> float | None:
        """Seconds that it takes where it is asked of this package."""
        return self.by_xla if self.decision.plan is None else self.by_kernel

    @property
    def seconds(self) -> float | None:
        """Seconds that it takes now."""
        return self.if_asked if self.is_ours else self.by_xla


@dataclasses.dataclass(frozen=True)
class Group:
    """Products that are computed alike.

    Attributes:
        entry: One of them.
        count: How many there are.
        places: The lines of the program that ask for them.
    """

    entry: Entry
    count: int
    places: tuple[str, ...]

    @property
    def decision(self) -> Decision:
        """The decision about each of them."""
        return self.entry.decision

    @property
    def gradient(self) -> bool:
        """Whether they are parts of derivatives in reverse mode."""
        return self.entry.origin.gradient

    @property
    def implementation(self) -> str:
        """The implementation that computes them."""
        return self.decision.implementation if self.entry.is_ours else "jax"

    @property
    def seconds(self) -> float:
        """The predicted time of all of them; 0 if nobody knows it."""
        return self.count * (self.entry.seconds or 0)

    @property
    def flops(self) -> int:
        """Multiplications plus additions of all of them; 0 where a size is a symbol."""
        each = self.decision.problem.flops
        return 0 if is_symbolic_dim(each) else self.count * each

    @property
    def passes(self) -> int:
        """Bytes that are moved around their kernels."""
        plan = self.decision.plan
        return 0 if plan is None or not self.entry.is_ours else self.count * plan.realigned.bytes


@dataclasses.dataclass(frozen=True)
class Findings:
    """All findings about the products of a function.

    Attributes:
        entries: Every product of the program, in its order: those that are asked of this package,
            and those of JAX's own. Derived and mapped products are there as they are computed:
            those of a gradient, one for a whole `vmap`.
        outside: (what, why) of each call that XLA computes without a look at the kernels.
        copies: Copies that are made of operands to bring their dimensions side by side.
        turned: Copies that the program makes of operands that a product would read as stored.
        passes: Over memory, between the products.
        device: The GPU that is planned for; None if there is none.
        nothing: The words for a function without a product.
        rewritten: The outcome for each product that `accelerate` found; None if it was not asked.
        configs: Whether the config of each product is printed, where there are several.
        last_layers: How `linear_cross_entropy` computes gradients, and what memory that takes.
        quantized: Each array that is quantized in blocks, by a kernel or by XLA, and why.
    """

    entries: tuple[Entry, ...]
    outside: tuple[tuple[str, str], ...] = ()
    copies: tuple[Copy, ...] = ()
    turned: tuple[Copy, ...] = ()
    passes: tuple[Pass, ...] = ()
    device: Device | None = None
    nothing: str = "no product"
    rewritten: tuple[Found, ...] | None = None
    configs: bool = False
    last_layers: tuple[str, ...] = ()
    quantized: tuple[str, ...] = ()

    @property
    def products(self) -> tuple[Decision, ...]:
        """The decision for each product that is asked of this package."""
        return tuple(e.decision for e in self.entries if e.is_ours and not e.is_outside)

    @property
    def by_jax(self) -> tuple[str, ...]:
        """The lines that multiply by JAX's own functions, once for each product."""
        return tuple(e.origin.place or UNKNOWN for e in self.entries if not e.is_ours)

    @property
    def all_copies(self) -> tuple[Copy, ...]:
        """All copies beside products, by them or by the program."""
        return (*self.copies, *self.turned)

    @property
    def implementation(self) -> str:
        """The implementation of the first product; "none" if there is none."""
        if self.products:
            return self.products[0].implementation
        return "xla" if self.outside else "none"

    @property
    def reason(self) -> str:
        """Why this implementation computes it."""
        if self.products:
            return self.products[0].reason
        return self.outside[0][1] if self.outside else self.nothing

    @property
    def plan(self) -> Plan | None:
        """How a kernel computes the first product: config, steps, predicted time."""
        return self.products[0].plan if self.products else None

    @property
    def seconds(self) -> float:
        """The predicted time of all products, of copies for them, and of passes between them."""
        return self._products(lambda entry: entry.seconds) + self.copy_seconds + self.pass_seconds

    @property
    def seconds_by_xla(self) -> float:
        """The same if XLA computed every product."""
        return self._products(lambda entry: entry.by_xla) + self.pass_seconds

    @property
    def seconds_if_asked(self) -> float:
        """The same if every product were asked of this package, one by one."""
        return self._products(lambda entry: entry.if_asked) + self.copy_seconds + self.pass_seconds

    @property
    def pass_seconds(self) -> float:
        """The predicted time of the passes over memory between products."""
        return self._moved([(own.bytes, own.times) for own in self.passes])

    @property
    def copy_seconds(self) -> float:
        """The predicted time of the copies that products make of their operands."""
        return self._moved([(own.bytes, own.times) for own in self.copies])

    def _products(self, seconds: Callable[[Entry], float | None]) -> float:
        return sum(entry.times * (seconds(entry) or 0) for entry in self.entries)

    def _moved(self, each: list[tuple[int, int]]) -> float:
        if self.device is None:
            return 0.0
        return sum(times * prediction.pass_seconds(size, self.device) for size, times in each)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The products, identical ones together, in the order of the program."""
        found: dict[Any, list[Entry]] = {}
        for entry in self.entries:
            alike = (entry.decision, entry.origin.gradient, entry.is_ours)
            found.setdefault(alike, []).append(entry)
        return tuple(
            Group(
                each[0],
                sum(entry.times for entry in each),
                tuple(dict.fromkeys(e.origin.place for e in each if e.origin.place is not None)),
            )
            for each in found.values()
        )
