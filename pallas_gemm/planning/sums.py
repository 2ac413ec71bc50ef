"""`Sums`: how the sums of a product are made, as a record that tells bits apart."""

import dataclasses
import itertools
import math
from typing import Any, Self

import numpy as np

from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.problem import Epilogue


@dataclasses.dataclass(frozen=True)
class Sums:
    """How the sums of a product are made, from the multiplication to the last rounding.

    Where two are equal, equal rows and columns give equal bits, on one chip and with one compiler.

    Attributes:
        invariant: "rows": the bits of a row do not depend on other rows. "run": they are the same
            in every run. None: nobody knows.
        by: "xla", "interpret", or the name of an architecture.
        device: The GPU that it is planned for; None without one.
        multiplied: The types that are multiplied.
        added: The type in which a sum is made.
        step: Elements of k that are multiplied at a time; 0 where nobody knows.
        parts: How many steps each part of a sum has. Parts are added up in their order.
        epilogue: The formula that is applied to a sum before it is rounded.
        rounded: The types that it is rounded to, one after the other.
        terms: The (left, right) arrays that are multiplied, the last one in `parts`, where each
            operand is split into several; `()` where it is one.
        whole: Everything else, where the bits depend on more; None elsewhere.
    """

    invariant: str | None
    by: str
    device: str | None
    multiplied: tuple[str, str]
    added: str
    step: int
    parts: tuple[int, ...]
    epilogue: Epilogue
    rounded: tuple[str, ...]
    terms: tuple[tuple[int, int], ...] = ()
    whole: Any = None

    @classmethod
    def of(cls, decision: Decision) -> Self:
        """Returns how a product is computed that was decided on."""
        problem, plan = decision.problem, decision.plan
        end = (problem.epilogue, (str(problem.out_dtype),))
        if plan is None:
            types = _multiplied_as(problem.a_dtype), _multiplied_as(problem.b_dtype)
            added = str(problem.accumulator_dtype)
            return cls(None, "xla", None, types, added, 0, (), *end, whole=problem)
        own, config = plan.realigned.problem, plan.config
        if plan.realigned.unfused is not None:
            end = (problem.epilogue, (str(own.out_dtype), str(problem.out_dtype)))
        types = _multiplied_as(own.a_dtype), _multiplied_as(own.b_dtype)
        steps, cut = -(-own.large_k // config.tile_k(own)), config.summed_in
        count = math.prod(cut)
        least, longer = divmod(steps, count)
        # What is promised is added up in one order, whoever makes the parts.
        in_order = bool(own.parts) or sorted(cut)[:-1] == [1] * (len(cut) - 1)
        is_plain = in_order and config.split_last is None
        whole = None if is_plain and not own.ragged_k else (own, config)
        parts = tuple(least + (part < longer) for part in range(count)) if whole is None else ()
        if (other := plan.otherwise) is not None:
            # Which of the two it is depends on all elements.
            whole = (own, config, other.realigned.problem, other.config)
        return cls(
            "rows" if own.parts else "run",
            decision.implementation,
            plan.device.kind,
            types,
            str(own.accumulator_dtype),
            config.tile_k(own),
            parts,
            *end,
            own.arrays,
            whole,
        )

    def __str__(self) -> str:
        types = " x ".join(dict.fromkeys(self.multiplied))
        if self.by == "xla":
            return f"{types} by XLA, which says nothing of its sums"
        steps = "as the config cuts them"
        if self.parts:
            runs = ((x, len(list(alike))) for x, alike in itertools.groupby(self.parts))
            each = " + ".join(f"{count} x {x}" if count > 1 else str(x) for x, count in runs)
            steps = f"{each} steps of {self.step}"
            steps = f"{len(self.terms)} terms, the largest in {steps}" if self.terms else steps
        own = self.invariant == "rows"
        kept = "a row keeps its bits among other rows" if own else "the same in every run"
        return (
            f"{types} in {self.added}, {steps}; rounded to {', then '.join(self.rounded)}; {kept}"
        )


def _multiplied_as(dtype: np.dtype) -> str:
    return "tf32" if dtype == np.float32 else str(dtype)
