"""How many arrivals complete each barrier of the kernels, derived from who takes part.

Mosaic multiplies the count of a cluster barrier by the number of CTAs that arrive on it: those in
the same row or column of the cluster. The counts here are per CTA, and the tests check the product.
"""


def full_arrivals(copies_per_slot: int) -> int:
    """The producer arrives once for each TMA copy into a slot, announcing the copy's bytes."""
    return copies_per_slot


def empty_arrivals(consumers: int, *, pingpong: bool) -> int:
    """One thread of each consumer that reads a slot; ping-pong consumers read different slots."""
    return 1 if pingpong else consumers


def masked_arrivals(consumers: int) -> int:
    """Each consumer, when it has zeroed its part of a slot."""
    return consumers


def taken_arrivals(consumers: int, *, pingpong: bool) -> int:
    """The producer, and each consumer that computes the piece."""
    return 1 + (1 if pingpong else consumers)


def baton_arrivals() -> int:
    """A ping-pong consumer hands the baton to exactly one other."""
    return 1


def commit_arrivals() -> int:
    """A commit of the tensor core arrives once, in each CTA that took part in the MMA."""
    return 1


def freed_arrivals() -> int:
    """One thread of the epilogue, which alone reads an accumulator."""
    return 1


def answer_arrivals() -> int:
    """The one role that requests clusters, announcing the bytes of the answer."""
    return 1


def read_arrivals(roles: int) -> int:
    """One thread of each role, all of which read every answer."""
    return roles
