"""What `explain` found, to print: identical products once, totals, and what could be changed."""

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from pallas_gemm.planning import tables
from pallas_gemm.planning.dispatch import OTHER_GPU, Decision, Plan, Reasons
from pallas_gemm.planning.realign import Step
from pallas_gemm.problem import Problem

WIDTH = 80
"""Columns of a page."""
PLACES = 3
"""How many lines of a program are named that ask for the same product."""

_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Who asks for a product.

    Attributes:
        place: The line of the program, such as "model.py:41"; None if it is not known.
        gradient: It is a part of a derivative in reverse mode.
    """

    place: str | None = None
    gradient: bool = False


@dataclasses.dataclass(frozen=True)
class Copy:
    """A pass over an operand that brings dimensions side by side, before any kernel is looked at.

    Attributes:
        what: What is done to which operand.
        bytes: Bytes read and written.
    """

    what: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.what}: moves {self.bytes / 1e6:.1f} MB"


@dataclasses.dataclass(frozen=True)
class Group:
    """Products that are computed alike.

    Attributes:
        decision: About each of them.
        gradient: They are parts of derivatives in reverse mode.
        count: How many there are.
        places: The lines of the program that ask for them.
    """

    decision: Decision
    gradient: bool
    count: int
    places: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The predicted time of all of them; 0 for XLA, whose time nobody predicts."""
        plan = self.decision.plan
        return 0.0 if plan is None else self.count * plan.seconds

    @property
    def passes(self) -> int:
        """Bytes that are moved around their kernels."""
        plan = self.decision.plan
        return 0 if plan is None else self.count * plan.realigned.bytes


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would compute the products of a function. `print` it, or give it to `rich.print`.

    >>> with target("h200"):
    ...     (product,) = explain(gemm, large, large).products
    >>> product.implementation
    'hopper'

    Attributes:
        products: The decision for each product, in the order of the program. What is derived or
            mapped is there as it is computed: the products of a gradient, one for a whole `vmap`.
        outside: (what, why) of each call that XLA computes without a look at the kernels.
        copies: Copies that are made of operands to bring their dimensions side by side.
        origins: Who asks for each of the products; empty where that is not known.
        by_jax: The lines that multiply by JAX's own functions, once for each product.
        nothing: What is said where there is no product.
        turned: Copies that the program makes of operands that a product would read as stored.
    """

    products: tuple[Decision, ...]
    outside: tuple[tuple[str, str], ...] = ()
    copies: tuple[Copy, ...] = ()
    origins: tuple[Origin, ...] = ()
    by_jax: tuple[str, ...] = ()
    nothing: str = "no product"
    turned: tuple[Copy, ...] = ()

    @property
    def all_copies(self) -> tuple[Copy, ...]:
        """What is copied before products, by them or by the program."""
        return (*self.copies, *self.turned)

    @property
    def implementation(self) -> str:
        """What computes the first product; "none" if there is none."""
        if self.products:
            return self.products[0].implementation
        return "xla" if self.outside else "none"

    @property
    def reason(self) -> str:
        """Why that computes it."""
        if self.products:
            return self.products[0].reason
        return self.outside[0][1] if self.outside else self.nothing

    @property
    def plan(self) -> Plan | None:
        """How a kernel computes the first product: config, steps, predicted time."""
        return self.products[0].plan if self.products else None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The products, identical ones together, in the order of the program."""
        found: dict[tuple[Decision, bool], list[str | None]] = {}
        origins = self.origins or (Origin(),) * len(self.products)
        for decision, origin in zip(self.products, origins, strict=True):
            found.setdefault((decision, origin.gradient), []).append(origin.place)
        return tuple(
            Group(decision, gradient, len(places), tuple(dict.fromkeys(filter(None, places))))
            for (decision, gradient), places in found.items()
        )

    def __str__(self) -> str:
        groups = self.groups
        parts = list(_summary(self)) if len(groups) > 1 else []
        parts += [_group_text(group) for group in groups]
        parts += [f"xla: {what}\n{_row('why', why)}" for what, why in self.outside]
        parts += [_row("before it", str(copy), 0) for copy in self.all_copies]
        if self.by_jax:
            parts.append(_row("JAX's own", _by_jax_text(self.by_jax), 0))
        parts += [_row("to change", hint, 0) for hint in hints(self)]
        return "\n".join(parts) or self.nothing

    def __rich__(self) -> Any:
        """Returns the table and the totals for `rich.print`."""
        from rich import box
        from rich.console import Group as Lines
        from rich.table import Table

        table = Table(*_HEADINGS, box=box.SIMPLE_HEAD)
        for column in table.columns[:1] + table.columns[4:]:
            column.justify = "right"
        for group in self.groups:
            table.add_row(*_cells(group, self.groups))
        rows = [_row(name, text, 0) for name, text in _totals(self)]
        rows += [_row("to change", hint, 0) for hint in hints(self)]
        return Lines(table, *rows)

    def json(self) -> str:
        """Returns it as JSON: groups of identical products, totals, what could be changed."""
        document = {
            "products": [_as_json(group) for group in self.groups],
            "outside": [{"what": what, "why": why} for what, why in self.outside],
            "copies": [dataclasses.asdict(copy) for copy in self.all_copies],
            "by_jax": list(self.by_jax),
            "totals": dict(_totals(self)),
            "to_change": hints(self),
        }
        return json.dumps(document, indent=1)


def hints(explanation: Explanation) -> list[str]:
    """Returns what the caller could change for more of the products to be fast."""
    found = [hint for group in explanation.groups for hint in _hints(group.decision)]
    if explanation.copies:
        found.append("keep contracted dimensions, and those of a batch, side by side in memory")
    if explanation.turned:
        found.append(
            "transpose_b=True, dot_general or einsum reads an operand as it is stored: a product of"
            " x.T copies x first"
        )
    if explanation.by_jax:
        found.append(
            "write pallas_gemm.matmul(a, b) for a @ b, pallas_gemm.einsum for jnp.einsum, and give"
            " layers dot_general=pallas_gemm.dot_general"
        )
    return list(dict.fromkeys(found))


def _hints(decision: Decision) -> Iterator[str]:
    problem, plan = decision.problem, decision.plan
    if decision.reason == "no GPU is planned for":
        yield 'with target("h200"): plans for a GPU that need not be here'
    slow = bool(_telling(decision)) if plan is None else plan.realigned.bytes > 0
    if slow and problem.a_dtype.name == problem.b_dtype.name == "float32":
        yield "dtype=bfloat16: float32 products are XLA's, or need their operands turned"
    for step in plan.realigned.steps if plan is not None else ():
        if (hint := _hint_of_step(step, problem)) is not None:
            yield hint


def _hint_of_step(step: Step, problem: Problem) -> str | None:
    """Returns how an operand could be stored so that a step is not needed."""
    stored = {
        "a": ("km" if problem.transpose_a else "mk", problem.a_shape),
        "b": ("nk" if problem.transpose_b else "kn", problem.b_shape),
    }
    if step.operand not in stored:
        return None
    names, shape = stored[step.operand]
    saved = f"saves {step.bytes / 1e6:.1f} MB"
    if step.action == "transpose":
        return f"store {step.operand} as [{names[1]}, {names[0]}]: {saved}"
    sizes = zip(names, shape[-2:], step.shape[-2:], strict=True)
    longer = [f"{name}={want}" for name, have, want in sizes if have < want]
    if step.action == "pad" and longer:
        return f"{' and '.join(longer)} in {step.operand}, instead of {list(shape)}: {saved}"
    return None


_HEADINGS = ("n", "by", "product", "dir", "us", "ms", "%")


def _summary(explanation: Explanation) -> Iterator[str]:
    groups = explanation.groups
    widths = (4, 9, 40, 4, 7, 7, 3)
    rows = [_HEADINGS, *(_cells(group, groups) for group in groups)]
    for row in rows:
        cells = [
            cell[:width].ljust(width) if 1 <= i <= 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield " ".join(cells).rstrip()
    for name, text in _totals(explanation):
        yield _row(name, text, 0)


def _cells(group: Group, groups: Iterable[Group]) -> tuple[str, ...]:
    decision, problem = group.decision, group.decision.problem
    count, by = f"{group.count}x", decision.implementation
    direction = "grad" if group.gradient else "fwd"
    if decision.plan is None:
        return count, by, _short_text(problem), direction, "-", "-", "-"
    times = f"{decision.plan.seconds * 1e6:.0f}", f"{group.seconds * 1e3:.2f}"
    share = group.seconds / sum(other.seconds for other in groups)
    return count, by, _short_text(problem), direction, *times, f"{100 * share:.0f}"


def _totals(explanation: Explanation) -> Iterator[tuple[str, str]]:
    """Yields (what, how much) about all products together."""
    groups = explanation.groups
    kinds = dict.fromkeys(g.decision.plan.device.kind for g in groups if g.decision.plan)
    place = f", for {', '.join(kinds)}" if kinds else ""
    yield "products", f"{len(explanation.products)}, of which {len(groups)} are distinct{place}"
    forward, gradients = (
        round(1e6 * sum(group.seconds for group in groups if group.gradient is gradient))
        for gradient in (False, True)
    )
    ways = f"{forward:,} forward and {gradients:,} in gradients"
    yield "predicted", f"{forward + gradients:,} us in kernels, {ways}"
    flops = sum(d.problem.flops for d in explanation.products)
    left = sum(d.problem.flops for d in explanation.products if d.plan is None)
    count = sum(d.plan is None for d in explanation.products) + len(explanation.outside)
    share = f", {100 * left / flops:.0f}% of the arithmetic" if flops else ""
    yield "left to XLA", f"{count} products{share}"
    moved = sum(g.passes for g in groups) + sum(copy.bytes for copy in explanation.all_copies)
    yield "moved", f"{moved / 1e6:.1f} MB besides what the kernels move"


def _group_text(group: Group) -> str:
    decision = group.decision
    count = f"{group.count} x " if group.count > 1 else ""
    way = ", gradient" if group.gradient else ""
    lines = [
        _row(f"{count}{decision.implementation}:", _problem_text(decision.problem) + way, 0, 0)
    ]
    rows = [("at", _places_text(group.places))] if group.places else []
    rows += [("why", decision.reason)]
    if decision.mesh is not None:
        rows.append(("mesh", decision.mesh))
    if (plan := decision.plan) is not None:
        known = "" if plan.device.machine.is_measured else ", on which nobody has measured yet"
        rows.append(("for", f"{plan.device.kind}{known}"))
        rows.append(("config", repr(plan.config)))
        rows.append(("predicted", f"{plan.seconds * 1e6:.0f} us ({plan.source})"))
        if plan.realigned.unfused is not None:
            rows.append(("epilogue", f"by XLA, because {plan.realigned.unfused}"))
        rows += [("step", str(step)) for step in plan.realigned.steps]
    rows += [(f"not {name}", "; ".join(reasons)) for name, reasons in _telling(decision)]
    return "\n".join([*lines, *(_row(name, text) for name, text in rows)])


def _telling(decision: Decision) -> list[tuple[str, Reasons]]:
    """Returns the refusals, without those of kernels for other GPUs: the reason says that."""
    return [x for x in decision.refused if not x[1][0].startswith(OTHER_GPU)]


def _row(name: str, text: str, indent: int = 2, width: int = 14) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=" " * indent + (f"{name:<{width}}" if width else f"{name} "),
        subsequent_indent=" " * 16,
        break_on_hyphens=False,
    )


def _places_text(places: tuple[str, ...]) -> str:
    more = len(places) - PLACES
    return ", ".join(places[:PLACES]) + (f" and {more} other lines" if more > 0 else "")


def _by_jax_text(places: tuple[str, ...]) -> str:
    count = len(places)
    return (
        f"{count} {'product is' if count == 1 else 'products are'} not asked of pallas_gemm, at"
        f" {_places_text(tuple(dict.fromkeys(places)))}"
    )


def _batch_text(problem: Problem) -> str:
    # A batch of sums over groups is of these, which are told beside the rows that they share.
    return f"{problem.batch} x " if problem.batch != 1 and not problem.ragged_k else ""


def _short_text(problem: Problem) -> str:
    dtypes = dict.fromkeys((problem.a_dtype.name, problem.b_dtype.name))
    types = "*".join(_SHORT.get(name, name) for name in dtypes)
    rows = f"{problem.m} ({problem.groups})" if problem.groups else str(problem.m)
    depth = f"{problem.k} ({problem.batch})" if problem.ragged_k else str(problem.k)
    sizes = f"{_batch_text(problem)}{rows} x {problem.n} x {depth} {problem.layout}"
    return " ".join([sizes, types, *_extras(problem)])


def _problem_text(problem: Problem) -> str:
    sizes = f"m={problem.m} n={problem.n} k={problem.k}"
    dtypes = f"{problem.a_dtype} x {problem.b_dtype} -> {problem.out_dtype}"
    if problem.pieces:
        sizes += f" ({' + '.join(map(str, problem.pieces))})"
    if problem.groups:
        sizes += f" in {problem.groups} groups of rows"
    if problem.ragged_k:
        sizes += f" in {problem.batch} groups of k"
    return " ".join([f"{_batch_text(problem)}{sizes} {problem.layout} {dtypes}", *_extras(problem)])


def _extras(problem: Problem) -> tuple[str, ...]:
    return (*(("symmetric",) if problem.symmetric else ()), *problem.epilogue.parts)


def _as_json(group: Group) -> dict[str, Any]:
    decision, plan = group.decision, group.decision.plan
    problem = decision.problem
    found: dict[str, Any] = {
        "count": group.count,
        "gradient": group.gradient,
        "places": list(group.places),
        "implementation": decision.implementation,
        "reason": decision.reason,
        "batch": problem.batch,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "groups": problem.batch if problem.ragged_k else problem.groups,
        "layout": problem.layout,
        "dtypes": [str(t) for t in (problem.a_dtype, problem.b_dtype, problem.out_dtype)],
        "epilogue": _extras(problem),
        "mesh": decision.mesh,
        "refused": {name: list(reasons) for name, reasons in decision.refused},
    }
    if plan is not None:
        found |= {
            "device": plan.device.kind,
            "config": _config_as_json(plan.config),
            "source": plan.source,
            "seconds": plan.seconds,
            "steps": [str(step) for step in plan.realigned.steps],
            "bytes_besides": plan.realigned.bytes,
        }
    return found


def _config_as_json(config: Any) -> Any:
    try:
        return tables.config_to_json(config)
    except ValueError:
        # Its order is an object, which has no name to be written.
        return repr(config)
