"""What planning says of products, as text: the text files beside this one.

They are written anew on purpose alone, and the changed lines belong to the review of a change:

    python -m pytest -n 0 tests/planning/test_planned.py --write-plans
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator

from pallas_gemm.config import GemmConfig
from pallas_gemm.planning import bands, dispatch, heuristics, prediction
from pallas_gemm.planning.architectures import WIDENED
from pallas_gemm.planning.by_xla import xla_time
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.planning.sums import Sums
from pallas_gemm.problem import Problem
from tests.planning.drawn import DRAWN
from tests.planning.products import ASKED, CONSIDERED, PREDICTED, Asked, Considered, Predicted
from tests.planning.swept import SWEPT, intervals

HERE = pathlib.Path(__file__).parent
FILES = {
    name: HERE / f"{name}.txt" for name in ("considered", "predicted", "decided", "drawn", "swept")
}


@functools.cache
def sections(file: pathlib.Path) -> dict[str, list[str]]:
    """Returns what a file has of each product: the lines after its name."""
    parts = re.split(r"^# (.*)\n", file.read_text(), flags=re.MULTILINE)[1:]
    return {
        name: body.rstrip("\n").split("\n")
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


@functools.cache
def write_all() -> None:
    """Writes the files, once."""
    said = {
        "considered": {name: considered(own) for name, own in CONSIDERED.items()},
        "predicted": {name: predicted(own) for name, own in PREDICTED.items()},
        "decided": {name: decided(own) for name, own in ASKED.items()},
        "swept": {name: intervals(own) for name, own in SWEPT.items()},
        "drawn": {name: in_short(own) for name, own in DRAWN.items()},
    }
    for name, file in FILES.items():
        each = ("\n".join((f"# {title}", *lines, "")) for title, lines in said[name].items())
        file.write_text("\n".join(each))


def _digits(value: float) -> str:
    """Returns six digits of a number: no computer adds up so differently."""
    return f"{value:.6g}"


def _us(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{_digits(seconds * 1e6)} us"


def _config(config: GemmConfig) -> str:
    """Returns the tile of a config, and what is unlike the defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    given = {name: getattr(config, name) for name in fields if name != "tile"}
    own = [
        name if value is True else f"{name}={value}"
        for name, value in given.items()
        if value != fields[name]
    ]
    return " ".join(("{} x {}".format(*config.tile), *own))


def considered(own: Considered) -> list[str]:
    """Returns what the heuristics consider for a product, the best first.

    A line has the score, which is the predicted time or a little more; what it is at least by what
    is known of the draft; and the rows of operands that tiles of one GPC read.
    """
    problem, architecture, device = own
    drafts, legal, refused = list(architecture.drafts(problem, device)), [], 0
    for draft in drafts:
        if (config := draft.finish()) is None:
            continue
        config = heuristics.fitted(problem, config, device)
        if not config.takes(problem, device):
            refused += 1
            continue
        score = heuristics.score(problem, config, device, architecture)
        numbers = [_digits(1e6 * score)]
        if architecture is not WIDENED:
            least = heuristics.score(problem, draft.config, device, architecture, at_least=True)
            rows = bands.rows_of_neighbours(problem, config, device)
            numbers += [_digits(1e6 * least), _digits(rows)]
        said = "".join(f"{number:<9}" for number in numbers)
        legal.append((score, f"{said}{_config(config)}"))
    best = heuristics.best(problem, device, architecture)
    return [
        f"{device.kind}: {len(drafts)} drafts, {refused} refused, {len(legal)} legal",
        f"best: {_config(best) if best else None}",
        *(line for _, line in sorted(legal, key=lambda pair: pair[0])),
    ]


def predicted(own: Predicted) -> list[str]:
    """Returns the predicted time of each config, its score, and the rows that neighbours read."""
    problem, configs, architecture, device = own
    lines = []
    for config in configs:
        arguments = problem, config, device, architecture
        numbers = [prediction.seconds(*arguments) * 1e6, heuristics.score(*arguments) * 1e6]
        if architecture is not WIDENED:
            numbers += [prediction.seconds(*arguments, at_least=True) * 1e6]
            numbers += [bands.rows_of_neighbours(problem, config, device)]
        said = "".join(f"{_digits(number):<9}" for number in numbers)
        lines.append(f"{said}{_config(config)}")
    return [f"for {device.kind}", *lines]


def decided(own: Asked) -> list[str]:
    """Returns what computes a product, why, how, and how long that is predicted to take."""
    try:
        decision = dispatch.decide(own.resolved, own.signature)
    except ValueError as error:
        checked = dispatch.why_impossible(own.resolved, own.signature)
        return [f"error: {error}", f"found before it is decided: {checked == str(error)}"]
    return list(_lines(own, decision))


def _changed(problem: Problem, other: Problem) -> str:
    """Returns what one problem has unlike another."""
    names = [field.name for field in dataclasses.fields(problem) if field.name != "epilogue"]
    values = {name: (getattr(problem, name), getattr(other, name)) for name in names}
    return ", ".join(f"{name}={new}" for name, (old, new) in values.items() if new != old)


def in_short(own: Asked) -> list[str]:
    """Returns what computes a product, and why or how, in a line."""
    try:
        decision = dispatch.decide(own.resolved, own.signature)
    except ValueError as error:
        return [f"error: {error}"]
    problem, plan, device = decision.problem, decision.plan, own.call.options.target
    assert device is not None
    by_xla = _us(xla_time.seconds(problem, device, own.call.precision))
    if plan is None:
        why = "; ".join(dict(decision.refused).get("hopper", (decision.reason,)))
        return [f"xla in {by_xla}: {why}"]
    passes = [f"{step.action} {step.operand}" for step in plan.realigned.passes]
    passes += ["epilogue"] if plan.realigned.unfused else []
    how = f" with {', '.join(passes)}" if passes else ""
    return [f"{_us(plan.seconds)} (XLA {by_xla}){how}: {_config(plan.config)}"]


def _lines(own: Asked, decision: Decision) -> Iterator[str]:
    problem, plan = decision.problem, decision.plan
    yield f"{decision.implementation}: {decision.reason}"
    for name, reasons in decision.refused:
        yield f"not {name}: {'; '.join(reasons)}"
    device = own.call.options.target
    by_xla = xla_time.seconds(problem, device, own.call.precision) if device else None
    yield f"XLA takes {_us(by_xla)}"
    yield str(Sums.of(decision))
    if plan is None:
        return
    realigned = plan.realigned
    yield from map(str, realigned.passes)
    if changed := _changed(problem, realigned.problem):
        yield f"for the kernel {changed}"
    if realigned.unfused:
        yield f"not in the kernel: {realigned.unfused}"
    if realigned.scheme:
        yield str(realigned.scheme)
    yield f"{plan.source}: {_config(plan.config)}"
    parts = {
        "all": plan.seconds,
        "passes": prediction.passes_seconds(realigned, plan.device),
        "epilogue": prediction.epilogue_seconds(problem, realigned, plan.device),
        "kernel": prediction.seconds(
            realigned.problem, plan.config, plan.device, plan.architecture
        ),
    }
    yield ", ".join(f"{name} {_us(seconds)}" for name, seconds in parts.items() if seconds)
    yield f"moves {problem.moved_bytes} bytes at least, {realigned.bytes} in passes"
