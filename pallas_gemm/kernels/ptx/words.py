"""Single words: of shared memory, and in global memory counters and flags.

Pallas has no loads from shared memory in one warp, and a store of its own would read the old value,
too. JAX's simulator knows no atomics: nothing simulated claims, and nobody waits for a flag there,
unless it is taught to (`tests/ptx_simulator.py`).
"""

from typing import Any

from pallas_gemm.kernels.ptx.operation import BetweenCtas, Operation, Ptx, nothing

LOOK_ANEW = Ptx(
    "{ bar.warp.sync 0xffffffff; st.volatile.shared.b32 [$1], $2;"
    " ld.volatile.shared.b32 $0, [$1]; bar.warp.sync 0xffffffff; }",
    results=1,
    convergent=True,
)
"""All lanes write the same. They meet before, so that a lane that is late does not read what
another writes in the next turn, and after it."""

CLAIM = Ptx(
    """{
        .reg .pred first; .reg .u32 lane; .reg .u32 number;
        mov.u32 lane, %laneid;
        mov.u32 number, 0;
        setp.eq.u32 first, lane, 0;
        @first atom.relaxed.gpu.global.add.u32 number, [$1], 1;
        shfl.sync.idx.b32 $0, number, 0, 31, 0xffffffff;
    }""",
    results=1,
    convergent=True,
)

ARRIVE = Ptx("red.release.gpu.global.add.u32 [$0], 1;")

AWAIT = Ptx(
    """{
        .reg .pred early; .reg .u32 arrived;
        AWAIT:
        ld.acquire.gpu.global.u32 arrived, [$0];
        setp.lt.u32 early, arrived, $1;
        @early bra AWAIT;
    }"""
)

READ = Ptx("ld.shared.b32 $0, [$1];", results=1)
WRITE = Ptx("st.shared.b32 [$0], $1;")


@Operation
def read(words: Any, at: Any) -> Any:
    """Reads a word of shared memory."""
    return READ([words.at[at]])[0]


@read.meaning
def _(words: Any, at: Any) -> Any:
    return words[at]


@Operation
def write(words: Any, at: Any, value: Any) -> None:
    """Writes a word of shared memory: all lanes the same."""
    WRITE([words.at[at]], [value])


@write.meaning
def _(words: Any, at: Any, value: Any) -> None:
    words[at] = value


@Operation
def looked_anew(words: Any, at: Any, value: Any) -> Any:
    """Returns a value by way of a word of shared memory, so that ptxas cannot know it."""
    return LOOK_ANEW([words.at[at]], [value])[0]


@looked_anew.meaning
def _(words: Any, at: Any, value: Any) -> Any:
    del words, at
    return value


def claim(counter: Any) -> Any:
    """Returns the next number of a counter in global memory, the same for all lanes of the warp."""
    return CLAIM([counter])[0]


@BetweenCtas
def arrive(flag: Any) -> None:
    """Says that what this thread has stored is there."""
    ARRIVE([flag])


arrive.meaning(nothing)


@BetweenCtas
def await_arrivals(flag: Any, arrivals: Any) -> None:
    """Waits until this number of threads has arrived."""
    AWAIT([flag], [arrivals])


await_arrivals.meaning(nothing)
