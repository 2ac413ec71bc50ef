"""How much memory the gradients of a last layer take, and how many products.

A last layer has a logit for each token and each word. Its gradients need the logits twice: kept
from the forward pass, or computed again for some words at a time.

    kept          3 products     an array of all logits, in the type of the operands
    recomputed    4 products     the slopes of one chunk of words, and sums in float32
    waiting       3 to 4         the same: logits wait in the array of the weight's gradient

Where kernels take their words of whole arrays (`loss_windows`), that is all. Elsewhere a chunk has
slices of its own, and sums lie beside those of the chunks before.
"""

import dataclasses
import functools
from typing import Any

from jax.export import is_symbolic_dim

from pallas_gemm.device import DEVICES, Device
from pallas_gemm.kernels.windows import ALIGNED
from pallas_gemm.planning.architectures import architecture_of

Memory = int | str | None
"""What a caller says: bytes, "least", "fastest", or None for the default."""

LEAST_WORDS, DEFAULT_WORDS = 6144, 8192
"""There is memory for so many: with fewer, products are too small to keep a GPU busy."""
SLOPES_BYTES = 180_000_000
"""Bytes of the slopes of a chunk where nothing is copied between chunks.

On an H200, 4096 x 4096 x 128256 takes 23.6 ms with 50 MB of them, 22.9 with 176, and 23.9 with 350.
"""
HALF = 2
"""Bytes of the elements that kernels take parts of."""
WAITING_SHARE = 8
"""Logits of at least one token in eight wait: for fewer, the product is hardly shorter."""
LEFT_BYTES = 48_000_000
"""Tiles leave at most this of the statistics, before it is joined."""
NARROWEST = 128
"""Words of the narrowest tiles that kernels have for many words."""
TILE_TOKENS = 128
"""Tokens of a tile."""
STEP = 768
"""Words of a chunk are a multiple of this, so that tiles of 192 and of 256 words fill it."""
LEAST_SHARE = 0.75
"""A chunk has at least this share of the words that there is memory for."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How the words of a last layer are divided for its gradients.

    Attributes:
        words: How many there are.
        each: How many a chunk has; the first may have fewer.
        kept: The forward pass keeps the logits: all of them are one chunk.
        bytes: Memory of the gradients beside operands and results.
        in_place: They are parts of whole arrays, read and written where they are.
        waiting: The logits of this many tokens, of how many there are, wait in the array that is to
            be the gradient of the weight.
    """

    words: int
    each: int
    kept: bool
    bytes: int
    in_place: bool = False
    waiting: tuple[int, int] = (0, 1)

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return 1 if self.kept else -(-self.words // self.each)

    @property
    def first(self) -> int:
        """How many words the first chunk has."""
        return self.words - (self.count - 1) * self.each

    @property
    def waits(self) -> bool:
        """Whether logits wait."""
        return self.waiting[0] > 0

    @property
    def begin(self) -> int:
        """Where the first chunk begins.

        It is the last of all words where logits wait: only the last may have fewer words than tiles
        have, and nothing of another may be overwritten.
        """
        return self.words - self.first if self.waits else 0

    @property
    def products(self) -> float:
        """How many products as large as the layer's own value and gradients take."""
        some, tokens = self.waiting
        return 3 if self.kept else 4 - some / tokens

    def __str__(self) -> str:
        how = "all logits kept"
        some, tokens = self.waiting
        chunks = f"in {self.count} chunks of {self.each} words"
        if not self.kept:
            how = f"logits computed again {chunks}"
        if some:
            how = f"logits of {some} tokens wait in the gradient of the weight, used {chunks}"
            how += f", those of {tokens - some} are computed again" * (some < tokens)
        products = f"{self.products:.2f}".rstrip("0").rstrip(".")
        return f"{products} products with gradients, {how}: {self.bytes / 1e6:,.0f} MB"


def takes_parts(target: Device | None, tokens: Any, width: Any, words: Any, itemsize: int) -> bool:
    """Whether kernels take their words of whole arrays, so that nothing is copied between them.

    Args:
        target: The GPU that is planned for, if it is known.
        tokens: How many there are.
        width: Elements of a token.
        words: How many logits a token has.
        itemsize: Bytes of an element of the operands.
    """
    own = None if target is None else architecture_of(target)
    if own is None or not own.takes_parts or itemsize != HALF:
        return False
    sizes = (tokens, width, words)
    return not any(map(is_symbolic_dim, sizes)) and width % ALIGNED == words % ALIGNED == 0


@functools.cache
def that_takes_parts() -> Device:
    """Returns a GPU whose kernels do."""
    return next(x for x in DEVICES.values() if takes_parts(x, ALIGNED, ALIGNED, ALIGNED, HALF))


@functools.lru_cache(maxsize=1024)
def chunks(
    tokens: Any, width: Any, words: Any, itemsize: int, memory: Memory, *, in_place: bool = False
) -> Chunks:
    """Returns how the words are divided.

    Args:
        tokens: How many there are.
        width: Elements of a token.
        words: How many logits a token has.
        itemsize: Bytes of an element of the operands.
        memory: The caller's word or number.
        in_place: Chunks are parts of whole arrays: see `takes_parts`.

    Raises:
        ValueError: The bytes are fewer than the least that is possible.
    """
    sizes = map(is_symbolic_dim, (tokens, width, words))
    if any(sizes):
        is_whole = is_symbolic_dim(words) or memory == "fastest" or words <= DEFAULT_WORDS
        each: Any = words if is_whole else DEFAULT_WORDS
        return Chunks(words, each, is_whole, 0)
    of_word = (tokens + (0 if in_place else width)) * itemsize
    # Without a place of its own, a sum lies beside the one before a chunk is added.
    sums = (1 if in_place else 2) * tokens * width * 4

    def of(each: int) -> Chunks:
        if each >= words:
            return Chunks(words, words, True, tokens * words * itemsize)
        # The slopes and the weight of these words. When the gradient of the weight comes, there is
        # room again.
        each = _alike(words, each) if in_place else each
        return Chunks(words, each, False, each * of_word + sums, in_place)

    enough = SLOPES_BYTES // of_word // STEP * STEP if in_place else 0
    whole, usual = of(words), of(max(DEFAULT_WORDS, enough))
    least = min(whole, of(max(LEAST_WORDS, enough)), key=lambda own: own.bytes)
    if not isinstance(memory, int):
        if memory is None:
            return min(whole, usual, key=lambda own: own.bytes)
        return whole if memory == "fastest" else least
    fewest = min(whole, of(LEAST_WORDS), key=lambda own: own.bytes)
    if memory < fewest.bytes:
        raise ValueError(
            f"memory={memory} bytes are too few for these sizes: the least is {fewest.bytes}"
            + ", which memory='least' takes" * (fewest == least)
        )
    if memory >= whole.bytes:
        return whole
    return of((memory - sums) // of_word // STEP * STEP)


def waiting(parts: Chunks, tokens: Any, width: Any) -> Chunks:
    """Returns the same chunks where logits may wait in the gradient of the weight.

    This gradient is `[width, words]`: it has room for the logits of `width` tokens.

    Args:
        parts: The chunks.
        tokens: How many there are.
        width: Elements of a token.
    """
    if is_symbolic_dim(tokens) or is_symbolic_dim(width):
        return parts
    some = min(tokens, width)
    if parts.kept or not parts.in_place or some * WAITING_SHARE < tokens:
        return parts
    return dataclasses.replace(parts, waiting=(some, tokens))


def together(tokens: Any, words: Any, vectors: int) -> Any:
    """Returns of how many tokens a kernel computes the statistics at a time.

    Args:
        tokens: How many there are.
        words: How many logits a token has.
        vectors: Numbers that a tile leaves of each token.
    """
    if is_symbolic_dim(tokens) or is_symbolic_dim(words):
        return tokens
    left = 4 * tokens * vectors * -(-words // NARROWEST)
    parts = max(1, -(-left // LEFT_BYTES))
    return min(tokens, -(-tokens // (parts * TILE_TOKENS)) * TILE_TOKENS)


def _alike(words: int, most: int) -> int:
    """Returns how many words each chunk has, at most this number, if all are about alike.

    The first has at least half of that, where that is possible, so that its kernels are alike too.
    """

    def preferred(each: int) -> tuple[float, int, float]:
        count = -(-words // each)
        share_of_first = (words - (count - 1) * each) / each
        return min(share_of_first, 1 / 2), -count, share_of_first

    return max(range(most // STEP * STEP, int(most * LEAST_SHARE) - 1, -STEP), key=preferred)
