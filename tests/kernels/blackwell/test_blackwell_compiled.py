"""The Blackwell kernel compiled ahead of time: no spills, and the instructions that it promises.

What is compiled covers the search space without being all of it, to take half a minute of one core:

* every step of the ladder, and one config for each mode of the kernel: a fifth of them in a run;
* every candidate of the heuristics with every second of some epilogues, which between them are in
  every layout, of every type, in a batch and without, dealt and taken over;
* some configs that are legal and never considered, as they are drawn.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.blackwell_ladder import STEPS
from pallas_gemm import offline
from pallas_gemm.call import DIMENSIONS
from pallas_gemm.device import B200
from pallas_gemm.kernels import protocol
from pallas_gemm.kernels.blackwell import kernel as blackwell
from pallas_gemm.kernels.blackwell import launch_control
from pallas_gemm.kernels.blackwell.config import BlackwellConfig
from pallas_gemm.kernels.blackwell.plan import BlackwellPlan
from pallas_gemm.kernels.functions.activations import gelu_tanh
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.planning.candidates.blackwell import SHAPES, candidates
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products
from pallas_gemm.tuning import space as tuning_space
from tests import summaries

Case = tuple[BlackwellConfig, Problem]

DRAWN = 8
"""Configs that are drawn: of what is wrong with every fourth, they show one 9 times in 10."""

PROBLEM = Problem(8192, 4096, 4096, transpose_b=True)
LAYOUTS = ("NT", "NN", "TN", "TT")
EPILOGUES = {
    "none": Epilogue(),
    "exact gelu": Epilogue(0.5, activation=lambda x: jax.nn.gelu(x, approximate=False)),
    "residual": Epilogue(0.5, 2.0, bias=True, residual=True),
    "residual and gelu": Epilogue(0.5, 2.0, bias=True, residual=True, activation=gelu_tanh),
    "swiglu": Epilogue(gated=True, activation=jax.nn.silu),
}
TYPES = (
    (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16),
    (jnp.float16, jnp.float16, jnp.float16),
    (jnp.bfloat16, jnp.bfloat16, jnp.float32),
    (jnp.float8_e5m2, jnp.float8_e5m2, jnp.float8_e4m3fn),
)
INTEGERS = (jnp.int8, jnp.int8, jnp.int32)

PAIRED = BlackwellConfig()
SINGLE = dataclasses.replace(PAIRED, cluster=(1, 1), stages=4)
RESIDUAL = dataclasses.replace(PROBLEM, epilogue=EPILOGUES["residual"])
MODES: dict[str, Case] = {
    **{step: (config, PROBLEM) for step, config in STEPS.items()},
    "one CTA": (SINGLE, PROBLEM),
    "one CTA, dynamic": (dataclasses.replace(SINGLE, persistence="dynamic"), PROBLEM),
    "on-line": (dataclasses.replace(PAIRED, schedule="online_swizzle:8"), PROBLEM),
    "deep steps": (dataclasses.replace(SINGLE, tile=(128, 64), stages=4, step_bytes=256), PROBLEM),
    "residual": (PAIRED, RESIDUAL),
    "three store slots": (
        dataclasses.replace(PAIRED, persistence="dynamic", store_slots=3, stages=5),
        RESIDUAL,
    ),
}


def build(case: Case) -> Callable[..., jax.Array]:
    config, problem = case
    return blackwell.build(BlackwellPlan(problem, config, B200))


def operands(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    arrays = [(problem.a_shape, problem.a_dtype)]
    arrays += [(problem.b_shape, problem.b_dtype)] * problem.sums
    own = (problem.batch,) if problem.batch > 1 else ()
    sizes = {"m": (problem.m,), "n": (problem.n,), "": ()}
    arrays += [
        (problem.out_shape, problem.out_dtype)
        if name == "residual"
        else ((*own, *sizes[DIMENSIONS[name]]), jnp.float32)
        for name in problem.epilogue.operands
    ]
    return [jax.ShapeDtypeStruct(*array) for array in arrays]


def check_sound(cases: Sequence[Case]) -> None:
    """Nothing spills, and shared and tensor memory are as predicted."""
    assert cases
    for config, problem in cases:
        kernel = build((config, problem))
        (found,) = summaries.KEPT.of(kernel, *operands(problem), target="b200")
        assert found.spill_bytes == 0, config
        predicted = config.shared_memory_bytes(problem)
        assert predicted - 2560 < found.shared_memory_bytes <= predicted
        columns = config.accumulators * config.tile[1]
        assert found.tensor_memory_columns == 2 ** math.ceil(math.log2(columns))


def of_types(problem: Problem, types: tuple[Any, Any, Any]) -> Problem:
    a, b, out = types
    return dataclasses.replace(problem, a_dtype=a, b_dtype=b, out_dtype=out)


def candidate_cases(problem: Problem) -> list[Case]:
    configs = candidates(problem, B200)
    return [(config, problem) for config in configs if not config.refusals(problem, B200)]


def drawn_problem(number: int, epilogue: Epilogue) -> Problem:
    """A type, a layout that it may have, and a batch or none, each with each as `number` grows."""
    types = TYPES[number % len(TYPES)]
    problem = dataclasses.replace(PROBLEM, epilogue=epilogue, batch=1 + 2 * (number % 3 == 2))
    wide = np.dtype(types[0]).itemsize == 2
    return of_types(products.transposed(problem, LAYOUTS[number % 4 if wide else 0]), types)


@pytest.mark.parametrize("name", EPILOGUES)
def test_every_candidate_with_an_epilogue(name):
    row = list(EPILOGUES).index(name)
    # Sums are in tensor memory, and registers hold a chunk of any tile alike.
    considered = list(enumerate(SHAPES))[row % 2 :: 2]
    cases = []
    for column, shape in considered:
        posed = drawn_problem(7 * row + column, EPILOGUES[name])
        persistence = ("static", "dynamic")[(row // 2 + column // 2) % 2]
        # Not every tile is for every layout.
        for problem in (posed, dataclasses.replace(posed, transpose_b=True)):
            (config,) = (
                config
                for config in candidates(problem, B200)
                if (config.tile, config.cluster, config.step_bytes) == shape
                and config.persistence == persistence
            )
            if not config.refusals(problem, B200):
                cases.append((config, problem))
                break
    assert len(cases) == len(considered)
    check_sound(cases)


def test_candidates_with_integers():
    check_sound(candidate_cases(of_types(PROBLEM, INTEGERS))[::3])


def test_wide_tiles():
    wide = BlackwellConfig(tile=(128, 512), accumulators=1)
    single = dataclasses.replace(wide, tile=(128, 384), cluster=(1, 1), stages=3)
    gated = dataclasses.replace(PROBLEM, epilogue=EPILOGUES["swiglu"])
    check_sound([(wide, PROBLEM), (single, RESIDUAL), (wide, gated)])


def test_legal_configs_that_are_never_considered(rng):
    check_sound([legal_case(rng) for _ in range(DRAWN)])


def legal_case(rng: np.random.Generator) -> Case:
    """Draws until a config is legal."""
    epilogues = list(EPILOGUES.values())
    while True:
        problem = drawn_problem(int(rng.integers(60)), epilogues[rng.integers(len(epilogues))])
        specialised, pairs = bool(rng.random() < 0.75), int(rng.integers(1, 3))
        config = BlackwellConfig(
            tile=(128, 16 * pairs * int(rng.integers(1, 1 + 16 // pairs))),
            stages=int(rng.integers(1, 9)),
            cluster=(pairs, 1),
            persistence=rng.choice(["none", "static", "dynamic"]) if specialised else "none",
            schedule=rng.choice(["hilbert", "online_swizzle:8"]),
            store_columns=int(rng.choice([16, 32, 64])),
            store_slots=int(rng.integers(1, 5)),
            accumulators=int(rng.integers(1, 3)),
            specialised=specialised,
            step_bytes=int(rng.choice([128, 256])),
            direct_store=bool(rng.random() < 0.25),
        )
        if not config.refusals(problem, B200):
            return config, problem


def test_what_tuning_tries():
    (blackwells,) = (known for known in ARCHITECTURES if known.name == "blackwell")
    tried = [
        # What differs only in its order, or in how many CTAs share it, is the same code.
        dataclasses.replace(config, ctas=None, schedule="hilbert")
        for config in tuning_space.configs(PROBLEM, B200, blackwells)
        if isinstance(config, BlackwellConfig)
    ]
    check_sound([(config, PROBLEM) for config in dict.fromkeys(tried)])


def read(report: offline.Report) -> summaries.Findings:
    """Returns what the checks below are about. The file knows it until a line here changes."""
    ptx = report.ptx

    def constant(operand: str) -> int:
        """The number in an operand, or in the register that is set to it once."""
        if operand.isdigit():
            return int(operand)
        (value,) = re.findall(rf"mov\.b32\s+{re.escape(operand)}, (\d+);", ptx)
        return int(value)

    # What each says that it does is in its name.
    families = r"(?:tcgen05|clusterlaunchcontrol|cp\.async\.bulk|fence\.proxy)"
    instructions = collections.Counter(re.findall(rf"\b{families}[a-z0-9_.:]+", ptx))
    waits = re.findall(r"cp\.async\.bulk\.wait_group\.read\s+(\d+)", ptx)
    moves = re.findall(r"setmaxnreg\.(dec|inc)\.sync\.aligned\.u32 (\d+)", ptx)
    barriers = re.findall(r"mbarrier\.init\.shared\S* \[\S+\], (\S+);", ptx)
    return {
        "target": re.findall(r"\.target (\w+)", ptx),
        "spill_bytes": report.spill_bytes,
        "stack": bool(re.search(r"[1-9]\d* bytes stack frame", report.log)),
        "cluster": list(report.cluster),
        "grid": math.prod(report.grid),
        "threads": report.threads,
        "registers": report.registers,
        "tensor_memory_columns": report.tensor_memory_columns,
        "instructions": dict(sorted(instructions.items())),
        "stored_bits": sum(map(int, re.findall(r"\bst(?:\.global)?\.b(\d+)", ptx))),
        "stmatrix": "stmatrix" in ptx,
        "waits": sorted(set(map(int, waits))),
        "moved": [" ".join(move) for move in moves],
        "barriers": sorted(map(constant, barriers)),
    }


@pytest.fixture(scope="module")
def modes() -> dict[str, tuple[Case, summaries.Findings]]:
    """Compiles a sample of the modes, and asks the file for the others."""
    return {
        name: (
            case,
            summaries.KEPT.findings(
                read,
                build(case),
                *operands(case[1]),
                target="b200",
                anew=summaries.in_sample(position),
            ),
        )
        for position, (name, case) in enumerate(cases_of_modes().items())
    }


def cases_of_modes() -> dict[str, Case]:
    """The modes with a pair less than there is room for."""
    return {
        name: (dataclasses.replace(config, ctas=B200.sms - 2), problem)
        for name, (config, problem) in MODES.items()
    }


@pytest.mark.every_other
@pytest.mark.parametrize("name", MODES)
def test_every_mode_is_sound(name, modes):
    _, found = modes[name]
    assert found["target"] == ["sm_100a"]
    assert found["spill_bytes"] == 0
    assert not found["stack"]


@pytest.mark.parametrize("name", MODES)
def test_pairs_multiply_load_and_commit_together(name, modes):
    (config, _), found = modes[name]
    done = collections.Counter(found["instructions"])
    pair = config.cluster_size == 2
    # A step of 64 is four MMAs of 16; each step has a commit, and so has each tile.
    each = config.step_bytes // 32
    assert done["tcgen05.mma.cta_group::2.kind::f16"] == (each if pair else 0)
    assert done["tcgen05.mma.cta_group::1.kind::f16"] == (0 if pair else each)
    commits = {name for name in done if name.startswith("tcgen05.commit")}
    assert all(("multicast::cluster" in commit) == pair for commit in commits)
    assert sum(done[commit] for commit in commits) == 2
    loads = {name for name in done if re.match(r"cp\.async\.bulk\.tensor\.2d\.shared", name)}
    operand_loads = {name for name in loads if name.endswith("cta_group::2")}
    assert bool(operand_loads) == pair
    assert found["cluster"] == [config.cluster_size, 1, 1]


@pytest.mark.parametrize("name", MODES)
def test_tiles_are_taken_over_by_cluster_launch_control_and_only_then(name, modes):
    (config, problem), found = modes[name]
    done = collections.Counter(found["instructions"])
    dynamic = config.persistence == "dynamic"
    asks = sum(done[name] for name in done if "clusterlaunchcontrol.try_cancel" in name)
    reads = sum(done[name] for name in done if "query_cancel.is_canceled" in name)
    # One role asks: for the two that are in flight at first, and in a loop for those that follow.
    assert asks == (2 + 1 if dynamic else 0)
    assert reads == (3 if dynamic else 0)
    assert all("multicast::cluster::all" in name for name in done if "try_cancel" in name)
    assert done["fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster"] == (
        1 if dynamic else 0
    )
    tiles = math.prod(config.stacked_grid(problem)) * config.cluster_size
    assert found["grid"] == (config.ctas if config.persistence == "static" else tiles)


@pytest.mark.parametrize("name", MODES)
def test_the_result_leaves_by_tma_unless_it_is_stored_directly(name, modes):
    (config, problem), found = modes[name]
    stores = sum(
        count
        for instruction, count in found["instructions"].items()
        if instruction.startswith("cp.async.bulk.tensor.2d.global.shared::cta")
    )
    assert stores == (0 if config.direct_store else 1)
    # Each of 128 threads stores its part of 128 rows: of each column an element.
    chunk = 8 * problem.out_dtype.itemsize * config.store_columns
    assert found["stored_bits"] == (chunk if config.direct_store else 0)
    assert found["stmatrix"] == (not config.direct_store)
    # What is read ahead of the last store may still be read by TMA.
    waits = {0} if problem.epilogue.residual else {0, config.store_slots - 1}
    assert set(found["waits"]) == (set() if config.direct_store else waits)


@pytest.mark.parametrize("name", MODES)
def test_the_sums_are_read_from_tensor_memory(name, modes):
    (config, problem), found = modes[name]
    done = collections.Counter(found["instructions"])
    reads = [name for name in done if name.startswith("tcgen05.ld")]
    assert reads
    # A load of 16x256b.xN brings 4 N registers; as a warp reads 32 lanes, it takes two.
    repeats = {name: int(re.findall(r"\.x(\d+)\.", name)[0]) for name in reads}
    registers = sum(4 * repeats[name] * done[name] for name in reads)
    assert registers == config.read_columns(problem)
    assert done["tcgen05.wait::ld.sync.aligned"] == 1
    assert found["tensor_memory_columns"] == config.accumulators * config.tile[1]


@pytest.mark.parametrize("name", MODES)
def test_warps_are_specialised_in_warpgroups_of_their_own(name, modes):
    (config, _), found = modes[name]
    if not config.specialised:
        assert (found["threads"], found["moved"]) == (256, [])
        return
    issuing, stored = config.registers
    assert found["threads"] == 384
    assert found["moved"] == [f"dec {issuing}"] * 2 + [f"inc {stored}"]
    assert 128 * (2 * issuing + stored) <= 128 * 3 * found["registers"]


@pytest.mark.parametrize("name", MODES)
def test_barriers_are_made_with_the_counts_of_the_protocol(name, modes):
    (config, problem), found = modes[name]
    plan = BlackwellPlan(problem, config, B200)
    made = collections.Counter(found["barriers"])
    # All 128 threads of a warpgroup arrive on a barrier of one CTA that does not order MMAs.
    expected = collections.Counter({128 * plan.full_arrivals: config.stages})
    expected[protocol.commit_arrivals()] += config.stages + config.accumulators
    freed = config.accumulators * config.halves(problem)
    expected[protocol.freed_arrivals() * config.cluster_size] += freed
    if problem.epilogue.residual:
        expected[128] += config.store_slots
    if config.persistence == "dynamic":
        expected[128 * protocol.answer_arrivals()] += launch_control.IN_FLIGHT
        readers = protocol.read_arrivals(plan.roles) * config.cluster_size
        expected[readers] += launch_control.IN_FLIGHT
    assert made == expected
