"""Sequences that can be learnt: a rule says what follows, and noise bounds how well it can go."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
    """Each token is a fixed permutation of the one before, or now and then any token at all.

    Attributes:
        vocabulary: How many tokens there are.
        noise: How often a token is any token.
        seed: The seed of the permutation and the sequences.
    """

    vocabulary: int
    noise: float = 0.1
    seed: int = 0

    @property
    def best_loss(self) -> float:
        """The loss, in nats per token, of a model that knows the rule."""
        likely = 1 - self.noise + self.noise / self.vocabulary
        other = self.noise / self.vocabulary
        return float(-likely * np.log(likely) - (self.vocabulary - 1) * other * np.log(other))

    def batch(self, step: int, examples: int, tokens: int) -> np.ndarray:
        """Returns the examples of a step, `[examples, tokens + 1]`: always the same ones."""
        follows = np.random.default_rng(self.seed).permutation(self.vocabulary)
        rng = np.random.default_rng((self.seed, step))
        drawn = rng.integers(0, self.vocabulary, (examples, tokens + 1), dtype=np.int32)
        random = rng.random((examples, tokens + 1)) < self.noise
        result = drawn.copy()
        for i in range(1, tokens + 1):
            result[:, i] = np.where(random[:, i], drawn[:, i], follows[result[:, i - 1]])
        return result
