"""`Explanation`: what `explain` finds, to print: a table, totals, and what could be changed."""

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from pallas_gemm.api.explaining.findings import UNKNOWN, Copy, Findings, Group
from pallas_gemm.planning import config_json
from pallas_gemm.planning.dispatch import OTHER_GPU, Decision, Reasons
from pallas_gemm.planning.realign import Step
from pallas_gemm.planning.sums import Sums
from pallas_gemm.problem import Problem
from pallas_gemm.rewriting.walk import Found

WIDTH = 80
"""Columns of a page."""
PLACES = 3
"""How many lines of a program are named that ask for the same product."""

_SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


class Explanation(Findings):
    """How the products of a function would be computed. `print` it, or give it to `rich.print`.

    >>> with target("h200"):
    ...     (product,) = explain(gemm, large, large).products
    >>> product.implementation
    'hopper'
    """

    def __str__(self) -> str:
        groups = self.groups
        is_table = len(groups) > 1 or bool(self.by_jax)
        parts = list(_summary(self)) if is_table else []
        parts += [_group_text(group, self) for group in groups if _is_told(group, self)]
        if not any(group.entry.is_outside and _is_told(group, self) for group in groups):
            parts += [f"xla: {what}\n{_row('why', why)}" for what, why in self.outside]
        if self.rewritten is not None:
            parts += [_row("accelerated" * (not i), text, 0) for i, text in enumerate(_fate(self))]
        parts += [_row("last layer", text, 0) for text in self.last_layers]
        parts += [_row("quantized", text, 0) for text in self.quantized]
        parts += [
            _row("after it" if copy.is_epilogue else "before it", str(copy), 0)
            for copy in _together(self.all_copies)
        ]
        if self.by_jax:
            parts.append(_row("JAX's own", _by_jax_text(self), 0))
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
            table.add_row(*_cells(group, self))
        rows = [_row(name, text, 0) for name, text in _totals(self)]
        rows += [_row("last layer", text, 0) for text in self.last_layers]
        rows += [_row("quantized", text, 0) for text in self.quantized]
        rows += [_row("to change", hint, 0) for hint in hints(self)]
        return Lines(table, *rows)

    def json(self) -> str:
        """Returns it as JSON: groups of identical products, totals, what could be changed."""
        document = {
            "products": [_as_json(group) for group in self.groups],
            "outside": [{"what": what, "why": why} for what, why in self.outside],
            "copies": [dataclasses.asdict(copy) for copy in self.all_copies],
            "last_layers": list(self.last_layers),
            "quantized": list(self.quantized),
            "passes": [dataclasses.asdict(own) for own in self.passes],
            "by_jax": list(self.by_jax),
            "rewritten": [dataclasses.asdict(own) for own in self.rewritten or ()],
            "seconds": self.seconds,
            "seconds_by_xla": self.seconds_by_xla,
            "seconds_if_asked": self.seconds_if_asked,
            "totals": dict(_totals(self)),
            "to_change": hints(self),
        }
        # Sizes may be symbols.
        return json.dumps(document, indent=1, default=str)


def hints(found: Findings) -> list[str]:
    """Returns what the caller could change for more of the products to be fast."""
    every = [hint for group in found.groups if group.entry.is_ours for hint in _hints(group)]
    if any(not copy.is_epilogue for copy in found.copies):
        every.append("keep contracted dimensions, and those of a batch, side by side in memory")
    if found.turned:
        every.append(
            "transpose_b=True, dot_general or einsum reads an operand as it is stored: a product of"
            " x.T copies x first"
        )
    if found.by_jax:
        every.append(
            "write pallas_gemm.matmul(a, b) for a @ b, pallas_gemm.einsum for jnp.einsum, and give"
            " layers dot_general=pallas_gemm.dot_general"
        )
    return list(dict.fromkeys(every))


def _hints(group: Group) -> Iterator[str]:
    decision = group.decision
    problem, plan = decision.problem, decision.plan
    if decision.reason == "no GPU is planned for":
        yield 'with target("h200"): plans for a GPU that need not be here'
    slow = bool(_telling(decision)) if plan is None else plan.realigned.bytes > 0
    slow = slow and (plan is None or plan.realigned.scheme is None)
    if slow and problem.a_dtype.name == problem.b_dtype.name == "float32":
        yield "dtype=bfloat16: operands of 16 bits are multiplied as they are stored"
    for step in plan.realigned.passes if plan is not None else ():
        if (hint := _hint_of_step(step, problem)) is not None:
            yield hint


def _hint_of_step(step: Step, problem: Problem) -> str | None:
    """Returns how an operand could be stored so that a step is not needed."""
    stored = {
        "a": ("km" if problem.transpose_a else "mk", problem.a_shape),
        "b": ("nk" if problem.transpose_b else "kn", problem.b_shape),
    }
    if step.operand not in stored or not step.bytes:
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


_HEADINGS = ("n", "by", "product", "dir", "us", "XLA us", "ms", "%")
_WIDTHS = (4, 9, 32, 4, 7, 7, 7, 3)


def _summary(found: Findings) -> Iterator[str]:
    rows = [_HEADINGS, *(_cells(group, found) for group in found.groups)]
    for row in rows:
        cells = [
            cell[:width].ljust(width) if 1 <= i <= 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, _WIDTHS, strict=True))
        ]
        yield " ".join(cells).rstrip()
    for name, text in _totals(found):
        yield _row(name, text, 0)


def _cells(group: Group, found: Findings) -> tuple[str, ...]:
    """Returns a row of the table: `us` by our kernel, `ms` of all by what computes them now."""
    entry, problem = group.entry, group.decision.problem
    flops = sum(other.flops for other in found.groups)
    share = f"{100 * group.flops / flops:.0f}" if flops else "-"
    direction = "grad" if group.gradient else "fwd"
    times = (_us(entry.by_kernel), _us(entry.by_xla))
    total = f"{group.seconds * 1e3:.2f}" if entry.seconds is not None else "-"
    what = _short_text(problem)
    return f"{group.count}x", group.implementation, what, direction, *times, total, share


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.0f}"


def _totals(found: Findings) -> Iterator[tuple[str, str]]:
    """Yields (what, how much) about all products together."""
    groups = found.groups
    kinds = dict.fromkeys(g.decision.plan.device.kind for g in groups if g.decision.plan)
    place = f", for {', '.join(kinds)}" if kinds else ""
    count = sum(group.count for group in groups)
    yield "products", f"{count}, of which {len(groups)} are distinct{place}"
    kernels = [group for group in groups if group.entry.is_ours and group.decision.plan]
    forward, gradients = (
        round(1e6 * sum(group.seconds for group in kernels if group.gradient is gradient))
        for gradient in (False, True)
    )
    ways = f"{forward:,} forward and {gradients:,} in gradients"
    yield "predicted", f"{forward + gradients:,} us in kernels, {ways}"
    flops = sum(group.flops for group in groups)
    others = (
        ("left to XLA", [g for g in groups if g.entry.is_ours and g.decision.plan is None]),
        ("not asked", [g for g in groups if not g.entry.is_ours]),
    )
    for name, left in others:
        if left or name == "left to XLA":
            number = sum(group.count for group in left)
            share = 100 * sum(group.flops for group in left) / flops if flops else 0
            us = round(1e6 * sum(group.seconds for group in left))
            time = f", {us:,} us" if us else ""
            text = f"{number} product{'s' * (number != 1)}, {share:.0f}% of the arithmetic"
            yield name, f"{text}{time}"
    moved = sum(g.passes for g in groups) + sum(own.bytes * own.times for own in found.all_copies)
    yield "moved", f"{moved / 1e6:.1f} MB besides what the kernels move"
    if found.device is not None:
        yield from _comparison(found)


def _comparison(found: Findings) -> Iterator[tuple[str, str]]:
    """Yields what all of a program's products take together, and what they would elsewhere."""
    passes = sum(own.times for own in found.passes)
    megabytes = sum(own.bytes * own.times for own in found.passes) / 1e6
    us = round(1e6 * found.pass_seconds)
    yield "between them", f"{us:,} us in {passes} passes over memory, {megabytes:,.0f} MB"
    unknown = sum(g.count for g in found.groups if g.entry.seconds is None)
    without = f", without {unknown} products that nobody can predict" if unknown else ""
    yield "all", f"{1e6 * found.seconds:,.0f} us{without}"
    if any(g.entry.by_xla is None for g in found.groups if g.entry.seconds is not None):
        return
    for name, seconds, what in (
        ("by XLA", found.seconds_by_xla, "if XLA computed every product"),
        ("if asked", found.seconds_if_asked, "if every product were asked of pallas_gemm"),
    ):
        if abs(seconds - found.seconds) >= 0.5e-6:
            change = 100 * (seconds / found.seconds - 1)
            yield name, f"{1e6 * seconds:,.0f} us, {what}: {change:+.1f}%"


def _together(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Yields copies, equal ones as one that is made as often."""
    times: dict[Copy, int] = {}
    for copy in copies:
        alike = dataclasses.replace(copy, times=1)
        times[alike] = times.get(alike, 0) + copy.times
    return (dataclasses.replace(copy, times=often) for copy, often in times.items())


def _is_told(group: Group, found: Findings) -> bool:
    """Whether there is more to say of a product than its row of the table."""
    if len(found.groups) == 1 or found.configs:
        return True
    if not group.entry.is_ours or group.entry.is_outside:
        return False
    decision = group.decision
    plan = decision.plan
    if plan is None or decision.mesh is not None:
        return True
    return bool(plan.realigned.passes or plan.realigned.unfused)


def _group_text(group: Group, found: Findings) -> str:
    decision = group.decision
    count = f"{group.count} x " if group.count > 1 else ""
    way = ", gradient" if group.gradient else ""
    what = _problem_text(decision.problem) + way
    lines = [_row(f"{count}{group.implementation}:", what, 0, 0)]
    rows = [("at", _places_text(group.places))] if group.places else []
    if not group.entry.is_ours:
        rows.append(("if asked", f"{decision.implementation}: {decision.reason}"))
    else:
        rows.append(("why", decision.reason))
    if decision.mesh is not None:
        rows.append(("mesh", decision.mesh))
    if (plan := decision.plan) is not None:
        known = "" if plan.device.machine.is_measured else ", on which nobody has measured yet"
        rows.append(("for", f"{plan.device.kind}{known}"))
        if found.configs or len(found.groups) == 1:
            rows.append(("config", repr(plan.config)))
        rows.append(("predicted", f"{plan.seconds * 1e6:.0f} us ({plan.source})"))
        rows.append(("sums", str(Sums.of(decision))))
        if plan.realigned.unfused is not None:
            rows.append(("epilogue", f"by XLA, because {plan.realigned.unfused}"))
        if plan.realigned.scheme is not None:
            rows.append(("scheme", str(plan.realigned.scheme)))
        rows += [("step", str(step)) for step in plan.realigned.passes]
    if group.entry.by_xla is not None:
        rows.append(("XLA", f"{group.entry.by_xla * 1e6:.0f} us, predicted"))
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


def _by_jax_text(found: Findings) -> str:
    count = len(found.by_jax)
    places = tuple(dict.fromkeys(place for place in found.by_jax if place != UNKNOWN))
    where = f", at {_places_text(places)}" if places else ""
    verb = "product is" if count == 1 else "products are"
    return f"{count} {verb} not asked of pallas_gemm{where}"


def _fate(found: Findings) -> Iterator[str]:
    """Yields what became of the products that `accelerate` found, equal answers together."""
    answers: dict[str, list[Found]] = {}
    for own in found.rewritten or ():
        answers.setdefault(own.answer, []).append(own)
    if not answers:
        yield "there is no product of JAX's own"
    for answer, each in answers.items():
        count = sum(own.times for own in each)
        places = tuple(dict.fromkeys(own.place for own in each if own.place is not None))
        where = f", at {_places_text(places)}" if places else ""
        yield f"{count} product{'s' * (count != 1)} {answer}{where}"


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
    if problem.terms:
        sizes += f" ({' + '.join(map(str, problem.terms))})"
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
        "asked": group.entry.is_ours,
        "seconds_by_xla": group.entry.by_xla,
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
            "steps": [str(step) for step in plan.realigned.passes],
            "scheme": None if plan.realigned.scheme is None else plan.realigned.scheme.name,
            "bytes_besides": plan.realigned.bytes,
            "sums": str(Sums.of(decision)),
        }
    return found


def _config_as_json(config: Any) -> Any:
    try:
        return config_json.written(config)
    except ValueError:
        # Its order is an object, which has no name to be written.
        return repr(config)
