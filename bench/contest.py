"""Chooses what is timed for a case: the best candidate of each peer that compiles and is right."""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from bench import command, products
from bench.peer import Candidate, Peer, Runner
from bench.peers import built
from bench.shapes import Case
from bench.workers import Workers
from pallas_gemm.tuning import accuracy
from pallas_gemm.tuning.measure import Meter, Settings, Variant, measure

COLD_BYTES = 2**28
"""Operands are rotated until this much has been read: several times the L2 of any GPU."""

MOST_SETS = 64

CHOICE = Settings(burst_rounds=3, burst_calls=4, pause=0.02, sustained_rounds=0, energy_seconds=0)
"""How long to look when a peer chooses among its candidates."""

BASELINE = "xla"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A candidate that compiled and gave right results, ready to be timed.

    Attributes:
        peer: The peer that it belongs to.
        label: Its name among the peer's candidates.
        variant: The function to time.
        error: Largest error of a tile in units of XLA's.
    """

    peer: str
    label: str
    variant: Variant
    error: float


@dataclasses.dataclass(frozen=True)
class Dropout:
    """A candidate that cannot take part.

    Attributes:
        peer: The peer that it belongs to.
        status: "failed" to compile or run, or "wrong".
        note: Why.
        error: As for a contender, if there was a result.
    """

    peer: str
    status: Literal["failed", "wrong"]
    note: str
    error: float | None = None


@dataclasses.dataclass(frozen=True)
class _Built:
    """A candidate after compilation: what runs it, or what went wrong."""

    peer: Peer
    candidate: Candidate
    runner: Runner | Exception


def contenders(
    case: Case,
    peers: Sequence[Peer],
    *,
    cold: bool,
    start: Callable[[str, int], None],
    advance: Callable[[], None],
    pool: Workers | None = None,
) -> tuple[list[Contender], list[Dropout]]:
    """Compiles and checks every candidate of some peers.

    Args:
        case: The product to compute.
        peers: The peers that do not refuse it. XLA must be the first: its errors are the yardstick.
        cold: Whether calls take other operands in turn, so that none is in the cache.
        start: Called with what begins and its number of steps.
        advance: Called after each step.
        pool: Processes that lower what can be lowered elsewhere.

    Returns:
        The contenders and the dropouts, both in the order of the peers.
    """
    contestants = _build_all(case, peers, start, advance, pool)
    sets = _operand_sets(case, cold=cold)
    start("checking", len(contestants))
    exact = accuracy.compiled_reference(products.exact(case), sets[0])
    reference = jax.block_until_ready(exact(sets[0]))
    passed: list[Contender] = []
    dropped: list[Dropout] = []
    yardstick: products.Results | None = None
    for one in contestants:
        found, errors = _check(one, sets, reference, yardstick)
        if one.peer.name == BASELINE:
            yardstick = errors
        if isinstance(found, Contender):
            passed.append(found)
        else:
            dropped.append(found)
        advance()
    return passed, dropped


def choose(
    passed: Sequence[Contender],
    meter: Meter,
    start: Callable[[str, int], None],
    advance: Callable[[], None],
) -> list[Contender]:
    """Returns the fastest contender of each peer, in burst."""
    by_peer: dict[str, list[Contender]] = {}
    for contender in passed:
        by_peer.setdefault(contender.peer, []).append(contender)
    chosen = []
    for peer, choices in by_peer.items():
        if len(choices) > 1:
            start(f"choosing among {len(choices)} of {peer}", CHOICE.turns(len(choices)))
        chosen.append(_fastest(choices, meter, advance))
    return chosen


def _fastest(choices: Sequence[Contender], meter: Meter, advance: Callable[[], None]) -> Contender:
    if len(choices) == 1:
        return choices[0]
    variants = [
        dataclasses.replace(choice.variant, name=str(i)) for i, choice in enumerate(choices)
    ]
    results = measure(variants, meter, CHOICE, baseline="0", advance=advance)
    bursts = [results[variant.name].burst for variant in variants]
    ratios = [timing.ratio.median for timing in bursts if timing is not None]
    return choices[ratios.index(max(ratios))]


def _build_all(
    case: Case,
    peers: Sequence[Peer],
    start: Callable[[str, int], None],
    advance: Callable[[], None],
    pool: Workers | None,
) -> list[_Built]:
    """Compiles every candidate: one by one those of peers that use the GPU for it."""
    jobs = [(peer, candidate) for peer in peers for candidate in peer.candidates(case)]
    start("compiling", len(jobs))

    def build(peer: Peer, candidate: Candidate) -> _Built:
        try:
            return _Built(peer, candidate, built(candidate, pool))
        except Exception as error:
            return _Built(peer, candidate, error)
        finally:
            advance()

    with concurrent.futures.ThreadPoolExecutor(command.threads()) as threads:
        # What holds nothing but a kernel is no work for the GPU, and need not wait for the others.
        early = {i: threads.submit(build, *job) for i, job in enumerate(jobs) if job[1].program}
        alone = {i: build(*job) for i, job in enumerate(jobs) if not job[0].threads}
        late = {
            i: threads.submit(build, *job)
            for i, job in enumerate(jobs)
            if i not in early and i not in alone
        }
    together = early | late
    return [alone[i] if i in alone else together[i].result() for i in range(len(jobs))]


def _operand_sets(case: Case, *, cold: bool) -> list[products.Operands]:
    """Returns enough sets of operands that each is out of the cache at its next turn."""
    count = 1
    if cold:
        count = min(MOST_SETS, math.ceil(COLD_BYTES / products.operand_bytes(case)))
    return [products.make_operands(case, key) for key in jax.random.split(jax.random.key(0), count)]


def _check(
    entry: _Built,
    sets: Sequence[products.Operands],
    reference: products.Results,
    yardstick: products.Results | None,
) -> tuple[Contender | Dropout, products.Results | None]:
    """Runs a candidate once.

    Returns:
        Its outcome, and if it is XLA's, the errors that the others' are compared with.
    """
    peer, name = entry.peer, entry.peer.name
    if isinstance(entry.runner, Exception):
        return Dropout(name, "failed", reason(entry.runner)), None
    if yardstick is None and name != BASELINE:
        return Dropout(name, "failed", "there is no result of XLA to compare with"), None
    try:
        adopted = [peer.adopt(operands) for operands in sets]
        results = entry.runner(adopted[0])
        peer.wait(results)
        if yardstick is None:
            errors = tuple(map(accuracy.tile_errors, peer.export(results), reference))
            worst = 1.0
        else:
            errors = None
            worst = products.worst_error(peer.export(results), reference, yardstick)
    except Exception as error:
        return Dropout(name, "failed", reason(error)), None
    if not worst <= accuracy.ALLOWED:
        note = f"{entry.candidate.label} errs {worst:.3g} times as much as XLA".strip()
        return Dropout(name, "wrong", note, worst), errors
    return Contender(
        name, entry.candidate.label, _variant(peer, entry.runner, adopted), worst
    ), errors


def _variant(peer: Peer, runner: Runner, adopted: Sequence[Any]) -> Variant:
    return Variant(peer.name, lambda i: runner(adopted[i % len(adopted)]), peer.wait)


def reason(error: Exception) -> str:
    """Returns an error in one line that fits a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
