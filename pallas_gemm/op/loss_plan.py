"""How much memory the gradients of a last layer take, and how many products.

A last layer has a logit for each token and each word. Its gradients need the logits twice: kept
from the forward pass, or computed again for some words at a time.

    kept          3 products     an array of all logits, in the type of the operands
    recomputed    4 products     the logits of one chunk of words, and sums in float32
"""

import functools
from typing import NamedTuple

from jax.export import is_symbolic_dim

Memory = int | str | None
"""What a caller says: bytes, "least", "fastest", or None for the default."""

LEAST_WORDS, DEFAULT_WORDS = 4096, 8192
"""Words of a chunk: with fewer, products are too small to keep a GPU busy."""
STEP = 256
"""Words of a chunk are a multiple of this, so that tiles fill it."""


class Chunks(NamedTuple):
    """How the words of a last layer are divided for its gradients.

    Attributes:
        words: How many there are.
        each: How many a chunk has; the first may have fewer.
        kept: The forward pass keeps the logits: all of them are one chunk.
        bytes: What the gradients take beside operands and results.
    """

    words: int
    each: int
    kept: bool
    bytes: int

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return 1 if self.kept else -(-self.words // self.each)

    @property
    def first(self) -> int:
        """How many words the first chunk has."""
        return self.words - (self.count - 1) * self.each

    @property
    def products(self) -> int:
        """How many products as large as the layer's own value and gradients take."""
        return 3 if self.kept else 4

    def __str__(self) -> str:
        how = "all logits kept"
        if not self.kept:
            how = f"logits computed again in {self.count} chunks of {self.each} words"
        return f"{self.products} products with gradients, {how}: {self.bytes / 1e6:,.0f} MB"


@functools.lru_cache(maxsize=1024)
def chunks(tokens: int, width: int, words: int, itemsize: int, memory: Memory) -> Chunks:
    """Returns how the words are divided.

    Args:
        tokens: How many there are.
        width: Elements of a token.
        words: How many logits a token has.
        itemsize: Bytes of an element of the operands.
        memory: What the caller says.

    Raises:
        ValueError: The bytes are fewer than the least that is possible.
    """
    if is_symbolic_dim(words):
        return Chunks(words, words, True, 0)
    if is_symbolic_dim(tokens) or is_symbolic_dim(width):
        is_whole = memory == "fastest" or words <= DEFAULT_WORDS
        return Chunks(words, words if is_whole else DEFAULT_WORDS, is_whole, 0)

    def of(each: int) -> Chunks:
        if each >= words:
            return Chunks(words, words, True, tokens * words * itemsize)
        # The slopes, the weight of these words and its gradient; the gradient of the tokens before
        # and after a chunk is added.
        chunk = (tokens + 2 * width) * each * itemsize
        return Chunks(words, each, False, chunk + 2 * tokens * width * 4)

    whole, least = of(words), of(LEAST_WORDS)
    if memory == "fastest" or whole.bytes <= least.bytes:
        if isinstance(memory, int) and memory < whole.bytes:
            raise ValueError(_too_few(memory, whole.bytes))
        return whole
    if memory == "least":
        return least
    if memory is None:
        usual = of(DEFAULT_WORDS)
        return whole if whole.bytes <= usual.bytes else usual
    if memory >= whole.bytes:
        return whole
    if memory < least.bytes:
        raise ValueError(_too_few(memory, least.bytes))
    more = (memory - least.bytes) // ((tokens + 2 * width) * itemsize)
    return of(LEAST_WORDS + more // STEP * STEP)


def _too_few(memory: int, least: int) -> str:
    return (
        f"memory={memory} bytes are too few for these sizes: the least is {least}, which"
        " memory='least' takes"
    )
