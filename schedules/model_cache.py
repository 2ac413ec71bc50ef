"""The L2 as the model sees it: partitions that each cache what their own SMs read."""

from collections import OrderedDict
from collections.abc import Sequence

MERGED, HIT, FABRIC, DRAM = range(4)
"""Where a read was answered: by a request already under way, by the near partition, by the one that
owns the block, or by device memory."""


class SplitCache:
    """An L2 of one or more partitions, each with a least-recently-used cache of its own.

    Each block has an owner: the partition its memory is attached to. A read looks into the
    partition of the SM that asks. If the block is neither there nor owned there, the read goes over
    the fabric and looks a second time, in the owner, and leaves a copy behind. So one block that
    all SMs read is held once per partition, and one miss can count twice.

    A read of a block that the same group of SMs is already waiting for is merged into the request
    under way, as the coalescer between the SMs and the L2 does: it counts as no request at all.

    Attributes:
        read: Size of all reads that were looked up, per SM request.
        merged: Size of the reads that joined a request under way.
        fabric: Size of the reads that were looked up a second time, in the owner.
        dram: Size of the reads from device memory.
        written: Size of all writes.
    """

    def __init__(
        self, capacity: int, owners: Sequence[int], *, partitions: int, groups: int
    ) -> None:
        """Starts empty.

        Args:
            capacity: Size of all partitions together.
            owners: For each block, the partition its memory is attached to.
            partitions: How many partitions there are.
            groups: How many groups of SMs; group g sits beside partition `g % partitions`.
        """
        self.read = self.merged = self.fabric = self.dram = self.written = 0
        self._owners = owners
        self._partitions = partitions
        self._capacity = capacity // partitions
        self._resident: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(partitions)]
        self._used = [0] * partitions
        self._under_way: list[dict[int, float]] = [{} for _ in range(groups)]

    def load(self, block: int, size: int, group: int, now: float, until: float) -> int:
        """Reads a block for an SM of a group; returns where the read was answered.

        Args:
            block: Which block.
            size: Its size.
            group: The group of the SM that reads.
            now: When the read is issued.
            until: Till when later reads may join it; not after `now` for one that none may join.
        """
        under_way = self._under_way[group]
        if until > now:
            if under_way.get(block, now) > now:
                self.merged += size
                return MERGED
            under_way[block] = until
        self.read += size
        side = group % self._partitions
        near = self._resident[side]
        if block in near:
            near.move_to_end(block)
            return HIT
        owner = self._owners[block]
        if owner != side:
            self.fabric += size
            self._insert(side, block, size)
            if block in self._resident[owner]:
                self._resident[owner].move_to_end(block)
                return FABRIC
        self.dram += size
        self._insert(owner, block, size)
        return DRAM

    def store(self, block: int, size: int) -> None:
        """Writes a whole block: it takes room in its owner, and nothing is read for it."""
        self.written += size
        self._insert(self._owners[block], block, size)

    def _insert(self, partition: int, block: int, size: int) -> None:
        resident = self._resident[partition]
        resident[block] = size
        self._used[partition] += size
        while self._used[partition] > self._capacity:
            self._used[partition] -= resident.popitem(last=False)[1]
