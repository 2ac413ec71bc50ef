"""Single words: of shared memory, and in global memory counters and flags.

Pallas has no loads from shared memory in one warp, and a store of its own would read the old value,
too. The simulator knows no atomics: nothing simulated claims, and nobody waits for a flag there.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.ptx.operation import INT32, NUMBER, REF, Operation, number_by, word_of

_LOOK_ANEW = "{ st.volatile.shared.b32 [$1], $2; ld.volatile.shared.b32 $0, [$1]; }"

_CLAIM = """{
    .reg .pred idle; .reg .u32 lane; .reg .u32 number;
    mov.u32 lane, %laneid;
    setp.ne.u32 idle, lane, 0;
    @idle bra CLAIMED;
    atom.relaxed.gpu.global.add.u32 number, [$1], 1;
    CLAIMED:
    shfl.sync.idx.b32 $0, number, 0, 31, 0xffffffff;
}"""

_ARRIVE = "red.release.gpu.global.add.u32 [$0], 1;"

_AWAIT = """{
    .reg .pred early; .reg .u32 arrived;
    AWAIT:
    ld.acquire.gpu.global.u32 arrived, [$0];
    setp.lt.u32 early, arrived, $1;
    @early bra AWAIT;
}"""


@Operation
def read(words: Any, at: Any) -> Any:
    """Reads a word of shared memory."""

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=INT32)
    def inline(_: Any, word: Any) -> Any:
        return number_by("ld.shared.b32 $0, [$1];", utils.memref_ptr(word))

    return inline(words.at[at])


@read.meaning
def _(words: Any, at: Any) -> Any:
    return words[at]


@Operation
def write(words: Any, at: Any, value: Any) -> None:
    """Writes a word of shared memory: all lanes the same."""

    @plgpu.inline_mgpu(arg_types=(REF, NUMBER))
    def inline(_: Any, word: Any, value: Any) -> None:
        where = utils.memref_ptr(word)
        utils.inline_ptx("st.shared.b32 [$0], $1;", where, word_of(value), has_side_effects=True)

    inline(words.at[at], value)


@write.meaning
def _(words: Any, at: Any, value: Any) -> None:
    words[at] = value


@Operation
def looked_anew(words: Any, at: Any, value: Any) -> Any:
    """Returns a value by way of a word of shared memory, so that ptxas cannot know it."""

    @plgpu.inline_mgpu(arg_types=(REF, NUMBER), return_type=INT32)
    def inline(_: Any, word: Any, value: Any) -> Any:
        return number_by(_LOOK_ANEW, utils.memref_ptr(word), word_of(value))

    return inline(words.at[at], value)


@looked_anew.meaning
def _(words: Any, at: Any, value: Any) -> Any:
    del words, at
    return value


def claim(counter: Any) -> Any:
    """Returns the next number of a counter in global memory, the same for all lanes of the warp."""

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=INT32)
    def inline(_: Any, counter: Any) -> Any:
        return number_by(_CLAIM, utils.memref_ptr(counter))

    return inline(counter)


@Operation
def arrive(flag: Any) -> None:
    """Says that what this thread has stored is there."""

    @plgpu.inline_mgpu(arg_types=(REF,))
    def inline(_: Any, flag: Any) -> None:
        utils.inline_ptx(_ARRIVE, utils.memref_ptr(flag), has_side_effects=True)

    inline(flag)


@arrive.meaning
def _(flag: Any) -> None:
    del flag


@Operation
def await_arrivals(flag: Any, arrivals: Any) -> None:
    """Waits until so many threads have arrived."""

    @plgpu.inline_mgpu(arg_types=(REF, NUMBER))
    def inline(_: Any, flag: Any, arrivals: Any) -> None:
        needed = word_of(arrivals)
        utils.inline_ptx(_AWAIT, utils.memref_ptr(flag), needed, has_side_effects=True)

    inline(flag, arrivals)


@await_arrivals.meaning
def _(flag: Any, arrivals: Any) -> None:
    del flag, arrivals
