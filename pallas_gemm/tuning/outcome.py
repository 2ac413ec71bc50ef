"""The outcome of tuning a product, and labels of products and configs."""

import dataclasses

from pallas_gemm.config import GemmConfig
from pallas_gemm.planning import tables
from pallas_gemm.problem import Problem


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result for one product.

    Attributes:
        problem: The product.
        config: The fastest config.
        seconds: How long its kernel takes in a burst.
        chosen: The heuristics' choice.
        chosen_seconds: How long that takes.
        gain: How much faster the config is than that choice, burst and sustained together.
        over_xla: How much faster it is than XLA, likewise: below one, the table says so, and XLA
            computes the product.
        left: Why the heuristics would leave the product to XLA; None if they would not.
        tried: How many configs were timed.
        dropped: Why others were not, such as a wrong result.
    """

    problem: Problem
    config: GemmConfig
    seconds: float
    chosen: GemmConfig
    chosen_seconds: float | None
    gain: float
    over_xla: float
    left: str | None
    tried: int
    dropped: tuple[str, ...] = ()

    @property
    def entry(self) -> tuple[tables.Key, tables.Entry]:
        """The entry of a table."""
        entry = tables.Entry(self.config, self.seconds, self.over_xla)
        return tables.Key.of(self.problem), entry

    def __str__(self) -> str:
        text = (
            f"{problem_label(self.problem)}: {config_label(self.config)},"
            f" {self.seconds * 1e6:.1f} us, {self.gain:.3f} x the heuristics' choice,"
            f" {self.over_xla:.3f} x XLA"
        )
        if self.over_xla < 1:
            text += ", which computes it"
        wrong = f", {len(self.dropped)} dropped: {self.dropped[0]}" if self.dropped else ""
        return f"{text} ({self.tried} tried{wrong})"


@dataclasses.dataclass(frozen=True)
class Untuned:
    """A product for which nothing was found.

    Attributes:
        problem: The product.
        reason: Why.
    """

    problem: Problem
    reason: str

    def __str__(self) -> str:
        return f"{problem_label(self.problem)}: {self.reason}"


def problem_label(problem: Problem) -> str:
    """Returns a product in a few characters."""
    sizes = "x".join(map(str, (problem.m, problem.n, problem.k)))
    batch = f"{problem.batch} of " if problem.batch > 1 else ""
    types = dict.fromkeys(
        str(dtype) for dtype in (problem.a_dtype, problem.b_dtype, problem.out_dtype)
    )
    epilogue = tables.Key.of(problem).epilogue
    parts = [f"{batch}{sizes}", problem.layout, *types, *epilogue.split()]
    return " ".join(parts)


def config_label(config: GemmConfig) -> str:
    """Returns what of a config differs from the defaults, in a few characters."""
    rows, cols = config.tile
    parts = [f"{rows}x{cols}", f"s{config.stages}"]
    usual = type(config)()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("tile", "stages") or value == getattr(usual, field.name):
            continue
        if isinstance(value, tuple):
            value = "x".join(map(str, value))
        name = getattr(value, "name", value)
        parts.append(field.name if value is True else f"{field.name}={name}")
    return " ".join(parts)
