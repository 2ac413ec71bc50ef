"""Products drawn at random, near sizes at which planning decides otherwise: for `drawn.txt`."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from pallas_gemm.call import Numerics, Options
from pallas_gemm.device import B200, H100, H200
from pallas_gemm.problem import Blocks, Epilogue
from tests.planning.products import (
    BF16,
    BYTES,
    E4M3,
    F16,
    F32,
    HIGHEST,
    INT4,
    INT8,
    PRESET,
    SINGLES,
    SWIGLU,
    WHOLES,
    Asked,
    asked,
)

COUNT = 240
ROWS = (1, 2, 5, 16, 17, 40, 48, 63, 64, 72, 100, 127, 128, 200, 256, 512, 640, 1000, 1024, 1040)
LARGE = (1408, 2047, 2048, 2560, 2944, 4096, 4104, 5120, 8192, 16384)
COLUMNS = (8, 64, 127, 128, 448, 512, 640, 768, 1003, 1024, 1536, *LARGE)
DEPTHS = (8, 100, 128, 256, 320, 500, 512, 576, 1001, 1024, 1088, 1408, *LARGE, 65536)
OPTIONS: Mapping[str, Sequence[Any]] = {
    "m": (*ROWS, *LARGE),
    "n": COLUMNS,
    "k": DEPTHS,
    "layout": ("NN", "NT", "NT", "TN", "TT"),
    "types": (
        *(3 * [(BF16, BF16, BF16)]),
        *((BF16, BF16, F32), (F16, F16, F16), BYTES, (E4M3, E4M3, F32)),
        *(SINGLES, (BF16, F32, F32), WHOLES, (BF16, INT8, BF16), (BF16, INT4, BF16)),
    ),
    "batch": (0, 0, 0, 0, 1, 3, 16, 33),
    "own": ("a b residual", "a residual", "b residual"),
    "epilogue": (
        *(4 * [Epilogue()]),
        *(Epilogue(bias=True), Epilogue(residual=True), Epilogue(activation=jax.lax.lgamma)),
        *(SWIGLU, Epilogue(gated=True, residual=True), Epilogue(row_scale=True, col_scale=True)),
    ),
    "precision": (None, None, HIGHEST, PRESET.BF16_BF16_F32_X3, PRESET.BF16_BF16_F32_X6),
    "promised": (None, None, None, Numerics("rows"), Numerics("run")),
    "target": (H200, H200, H200, H200, H200, H100, B200),
}


def _name(own: Mapping[str, Any]) -> str:
    left, right, out = (str(x) for x in own["types"])
    types = left if left == right else f"{left} x {right}"
    words = [f"{own['m']} x {own['n']} x {own['k']} {own['layout']} of {types} to {out}"]
    if own["batch"]:
        words.append(f"batch of {own['batch']}, each has {own['own']}")
    words += own["epilogue"].parts
    if own["blocks"]:
        words.append(str(own["blocks"]))
    if own["precision"]:
        words.append(getattr(own["precision"], "name", "HIGHEST"))
    if own["promised"]:
        words.append(str(own["promised"]))
    words.append(own["target"].kind)
    return ", ".join(words)


def _drawn() -> Iterator[tuple[str, Asked]]:
    chance = random.Random(37)
    for _ in range(COUNT):
        own = {name: each[int(chance.random() * len(each))] for name, each in OPTIONS.items()}
        # A precision says something of float32 alone.
        own["precision"] = own["precision"] if F32 in own["types"][:2] else None
        few_bits = own["types"][1].itemsize == 1 and own["types"][0] == BF16
        own["blocks"] = Blocks(128, 0, 1) if few_bits and own["k"] % 128 == 0 else None
        if own["target"] is B200:
            own["implementation"] = "blackwell"
        if own["blocks"]:
            own["batch"], own["epilogue"] = 0, Epilogue(col_blocks=True)
        yield _name(own), _asked(**own)


def _asked(m: int, n: int, k: int, layout: str, implementation: str = "", **own: Any) -> Asked:
    options = Options(implementation or None)
    if not own["blocks"]:
        del own["blocks"]
    return asked((m, n, k), layout, options=options, **own)


DRAWN: Mapping[str, Asked] = dict(_drawn())
