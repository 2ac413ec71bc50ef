"""`Sums`: how the sums of a product are made, as a record that tells bits apart."""

import dataclasses
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
    whole: Any = None

    @classmethod
    def of(cls, decision: Decision) -> Self:
        """Returns how a product is computed that was decided on."""
        problem, plan = decision.problem, decision.plan
        types = _multiplied_as(problem.a_dtype), _multiplied_as(problem.b_dtype)
        end = (problem.epilogue, (str(problem.out_dtype),))
        if plan is None:
            added = str(problem.accumulator_dtype)
            return cls(None, "xla", None, types, added, 0, (), *end, problem)
        own, config = plan.realigned.problem, plan.config
        if plan.realigned.unfused is not None:
            end = (problem.epilogue, (str(own.out_dtype), str(problem.out_dtype)))
        steps, parts = config.steps(own), config.summed_in
        count = max(parts)
        least, longer = divmod(steps, count)
        is_plain = sorted(parts)[:-1] == [1] * (len(parts) - 1) and config.split_last is None
        whole = None if is_plain and not own.ragged_k else (own, config)
        return cls(
            "rows" if own.parts else "run",
            decision.implementation,
            plan.device.kind,
            types,
            str(own.accumulator_dtype),
            config.tile_k(own),
            tuple(least + (part < longer) for part in range(count)) if whole is None else (),
            *end,
            whole,
        )

    def __str__(self) -> str:
        types = " x ".join(dict.fromkeys(self.multiplied))
        if self.by == "xla":
            return f"{types} by XLA, which says nothing of its sums"
        steps = "as the config cuts them"
        if self.parts:
            each = " + ".join(map(str, self.parts))
            steps = f"{each} steps of {self.step}"
        own = self.invariant == "rows"
        kept = "a row keeps its bits among other rows" if own else "the same in every run"
        return (
            f"{types} in {self.added}, {steps}; rounded to {', then '.join(self.rounded)}; {kept}"
        )


def _multiplied_as(dtype: np.dtype) -> str:
    return "tf32" if dtype == np.float32 else str(dtype)
