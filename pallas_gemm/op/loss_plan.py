"""How much memory the gradients of a last layer take, and how many products.

A last layer has a logit for each token and each word. Its gradients need the logits twice: kept
from the forward pass, or computed again for some words at a time.

    kept          3 products     an array of all logits, in the type of the operands
    recomputed    4 products     the logits of one chunk of words, and sums in float32
"""

import dataclasses
import functools
from typing import Any

from jax.export import is_symbolic_dim

Memory = int | str | None
"""What a caller says: bytes, "least", "fastest", or None for the default."""

LEAST_WORDS, DEFAULT_WORDS = 6144, 8192
"""Words of a chunk: with fewer, products are too small to keep a GPU busy."""
STEP = 256
"""Words of a chunk are a multiple of this, so that tiles fill it."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How the words of a last layer are divided for its gradients.

    Attributes:
        words: How many there are.
        each: How many a chunk has; the first may have fewer.
        kept: The forward pass keeps the logits: all of them are one chunk.
        bytes: Memory of the gradients beside operands and results.
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
def chunks(tokens: Any, width: Any, words: Any, itemsize: int, memory: Memory) -> Chunks:
    """Returns how the words are divided.

    Args:
        tokens: How many there are.
        width: Elements of a token.
        words: How many logits a token has.
        itemsize: Bytes of an element of the operands.
        memory: The caller's word or number.

    Raises:
        ValueError: The bytes are fewer than the least that is possible.
    """
    sizes = map(is_symbolic_dim, (tokens, width, words))
    if any(sizes):
        is_whole = is_symbolic_dim(words) or memory == "fastest" or words <= DEFAULT_WORDS
        each: Any = words if is_whole else DEFAULT_WORDS
        return Chunks(words, each, is_whole, 0)

    def of(each: int) -> Chunks:
        if each >= words:
            return Chunks(words, words, True, tokens * words * itemsize)
        # The slopes and the weight of these words; the gradient of the tokens before and after a
        # chunk is added. When the gradient of the weight comes, there is room again.
        chunk = (tokens + width) * each * itemsize
        return Chunks(words, each, False, chunk + 2 * tokens * width * 4)

    whole, usual = of(words), of(DEFAULT_WORDS)
    least = min(whole, of(LEAST_WORDS), key=lambda own: own.bytes)
    if not isinstance(memory, int):
        if memory is None:
            return min(whole, usual, key=lambda own: own.bytes)
        return whole if memory == "fastest" else least
    if memory < least.bytes:
        raise ValueError(
            f"memory={memory} bytes are too few for these sizes: the least is {least.bytes}, which"
            " memory='least' takes"
        )
    if memory >= whole.bytes:
        return whole
    more = (memory - least.bytes) // ((tokens + width) * itemsize)
    return of(LEAST_WORDS + more // STEP * STEP)
