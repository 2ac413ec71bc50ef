"""A candidate before what takes long to find is found."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pallas_gemm.config import GemmConfig


class Draft[Config: GemmConfig](NamedTuple):
    """A candidate of which enough is known to say how long it takes at least.

    Attributes:
        config: It, with its tile, how that is stored and how k is cut.
        finish: Returns it with all stages that fit; None if too few do.
    """

    config: Config
    finish: Callable[[], Config | None]


def finished[Config: GemmConfig](drafts: Iterable[Draft[Config]]) -> Iterator[Config]:
    """Yields the configs of drafts."""
    return (config for draft in drafts if (config := draft.finish()) is not None)


def complete[**P, Config: GemmConfig](
    candidates: Callable[P, Iterable[Config]],
) -> Callable[P, Iterator[Draft[Config]]]:
    """Returns the function that yields candidates as drafts that lack nothing."""

    def drafts(*args: P.args, **kwargs: P.kwargs) -> Iterator[Draft[Config]]:
        return (Draft(own, lambda own=own: own) for own in candidates(*args, **kwargs))

    return drafts
