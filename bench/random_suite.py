"""Products that nobody can tune for: drawn from the sizes of published models.

    python bench/gemm_bench.py --suite=random --seed=3

A seed draws 64 different products. Tables and heuristics learn from some seeds and are judged on
others; `ladder.md` says which.
"""

import numpy as np

from bench import suites
from bench.shapes import Case

NAME = "random"
"""Its name on a command line."""

COUNT = 64
MOST_ROWS = 32768

# Hidden, feed-forward and (where it is another) projection sizes of Llama 3 8B, 70B and 405B,
# Mistral and Mixtral 8x7B and 8x22B, Qwen 2.5 7B, 32B and 72B, Gemma 2 9B and 27B, DeepSeek-V3,
# GPT-3 6.7B and 175B, Phi-3 medium, Command R+, and gpt-oss, from their published configurations.
MODEL_SIZES = (
    2048,
    2880,
    3584,
    4096,
    4608,
    5120,
    6144,
    7168,
    8192,
    11008,
    12288,
    14336,
    16384,
    17920,
    18432,
    18944,
    27648,
    28672,
    29568,
    33792,
    36864,
    49152,
    53248,
)
SHARES = (1, 2, 4, 8)
"""What a layer is cut into: a size is divided by one of these where the result is whole."""
STEP = 128
STEPS = (4, 128)
"""One size in four is a multiple of `STEP` from 512 to 16384 instead."""
SMALLEST = 256
DTYPES = {"bf16": 0.8, "f16": 0.1, "e4m3": 0.1}
LAYOUTS = ("NN", "NT", "TN")
ROWS_OF_A_LINE = 8
"""The rows of a left operand that is stored [k, m] are a multiple of this: 16 bytes."""


def suite(name: str, seed: int) -> tuple[Case, ...]:
    """Returns the cases of a suite, of this one or of those in `suites`.

    Raises:
        ValueError: There is none of that name.
    """
    return drawn(seed) if name == NAME else suites.suite(name)


def drawn(seed: int, count: int = COUNT) -> tuple[Case, ...]:
    """Returns the products of a seed, no two alike.

    Rows are log-uniform from 1 to 32768. Operands of 8 bits are stored as the tensor cores take
    them, NT; of the others a third each is NN, NT and TN.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, Case] = {}
    while len(found) < count:
        case = _one(rng, seed)
        found.setdefault(case.name, case)
    return tuple(found.values())


def _one(rng: np.random.Generator, seed: int) -> Case:
    m = int(np.exp(rng.uniform(0, np.log(MOST_ROWS + 1))))
    n, k = _size(rng), _size(rng)
    dtype = str(rng.choice(list(DTYPES), p=list(DTYPES.values())))
    layout = str(rng.choice(LAYOUTS))
    if dtype == "e4m3":
        layout = "NT"
    if layout == "TN":
        m = -(-m // ROWS_OF_A_LINE) * ROWS_OF_A_LINE
    return Case(m, n, k, dtype, layout, source=f"random, seed {seed}")


def _size(rng: np.random.Generator) -> int:
    if rng.random() < 0.25:
        return STEP * int(rng.integers(STEPS[0], STEPS[1] + 1))
    size, share = int(rng.choice(MODEL_SIZES)), int(rng.choice(SHARES))
    whole = size % (share * 8) == 0 and size // share >= SMALLEST
    return size // share if whole else size
