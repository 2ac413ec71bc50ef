"""The simulated L2, read by read."""

from schedules.model_cache import DRAM, FABRIC, HIT, MERGED, SplitCache


def cache(capacity: int, partitions: int = 2, groups: int = 4) -> SplitCache:
    """Blocks 0 and 2 are owned by partition 0, blocks 1 and 3 by partition 1."""
    owners = [block % partitions for block in range(8)]
    return SplitCache(capacity, owners, partitions=partitions, groups=groups)


def read(l2: SplitCache, block: int, group: int, *, size: int = 10) -> int:
    return l2.load(block, size, group, now=0.0, until=0.0)


def test_a_far_block_is_looked_up_twice_and_leaves_a_copy() -> None:
    l2 = cache(100)
    assert read(l2, 1, group=0) == DRAM
    assert (l2.read, l2.fabric, l2.dram) == (10, 10, 10)
    # Groups 0 and 2 sit beside partition 0, which has a copy; group 1 beside the owner.
    assert read(l2, 1, group=2) == HIT
    assert read(l2, 1, group=1) == HIT
    assert (l2.read, l2.fabric, l2.dram) == (30, 10, 10)


def test_what_the_owner_has_is_fetched_over_the_fabric() -> None:
    l2 = cache(100)
    assert read(l2, 1, group=1) == DRAM
    assert read(l2, 1, group=0) == FABRIC
    assert read(l2, 1, group=0) == HIT
    assert (l2.fabric, l2.dram) == (10, 10)


def test_the_least_recently_read_block_leaves_first() -> None:
    l2 = cache(20, partitions=1, groups=1)
    for block in (0, 1, 0, 2):
        read(l2, block, group=0)
    assert read(l2, 0, group=0) == HIT
    assert read(l2, 1, group=0) == DRAM


def test_each_partition_has_its_part_of_the_capacity() -> None:
    l2 = cache(20)
    read(l2, 0, group=0)
    read(l2, 2, group=0)
    read(l2, 1, group=1)
    assert read(l2, 0, group=0) == DRAM
    assert read(l2, 1, group=1) == HIT


def test_writes_take_room_in_the_owner_and_read_nothing() -> None:
    l2 = cache(20, partitions=1, groups=1)
    read(l2, 0, group=0)
    l2.store(4, 15)
    assert (l2.written, l2.dram) == (15, 10)
    assert read(l2, 0, group=0) == DRAM


def test_a_read_joins_one_under_way_in_its_own_group_only() -> None:
    l2 = cache(100)
    assert l2.load(0, 10, 0, now=0.0, until=2.0) == DRAM
    assert l2.load(0, 10, 0, now=1.0, until=3.0) == MERGED
    assert l2.load(0, 10, 2, now=1.0, until=3.0) == HIT
    assert (l2.merged, l2.read) == (10, 20)


def test_a_joined_read_does_not_keep_the_request_under_way_for_longer() -> None:
    l2 = cache(100)
    l2.load(0, 10, 0, now=0.0, until=2.0)
    assert l2.load(0, 10, 0, now=1.0, until=3.0) == MERGED
    assert l2.load(0, 10, 0, now=2.0, until=4.0) == HIT


def test_a_multicast_joins_nothing() -> None:
    l2 = cache(100)
    l2.load(0, 10, 0, now=0.0, until=2.0)
    assert l2.load(0, 10, 0, now=1.0, until=1.0) == HIT
    assert l2.merged == 0
