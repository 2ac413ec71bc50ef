"""What reads a sum before the wait for the WGMMAs that make it.

LLVM knows no such wait. It may move an instruction before one, if all that it takes are registers.
The assembler says nothing, and the sum lacks its last products. No simulator shows that, so PTX is
read instead.
"""

from collections.abc import Sequence

from tests.ptx_code import Instruction, Kernel, kernels


def early(ptx: str) -> list[str]:
    """Returns the instructions of a module that read a sum too early."""
    return [text for kernel in kernels(ptx) for text in _early(kernel)]


def _early(kernel: Kernel) -> list[str]:
    awaited: list[set[str]] = [set() for _ in kernel.blocks]
    changed = set(range(len(kernel.blocks)))
    found: dict[int, list[str]] = {}
    while changed:
        number = min(changed)
        changed.remove(number)
        after, found[number] = _after(kernel.blocks[number], awaited[number])
        for following in kernel.following[number]:
            if not after <= awaited[following]:
                awaited[following] |= after
                changed.add(following)
    return [text for number in sorted(found) for text in found[number]]


def _after(block: Sequence[Instruction], before: set[str]) -> tuple[set[str], list[str]]:
    """Returns the registers that WGMMAs still write after a block, and what reads some within it.

    Args:
        block: The block.
        before: Those that they write where it begins.
    """
    awaited, found = set(before), []
    for own in block:
        if own.operation.startswith("wgmma.wait_group"):
            awaited = set() if own.text.endswith(" 0") else awaited
            continue
        results, read = own.split()
        reads_sums = not awaited.isdisjoint((*read, own.predicate))
        if own.operation.startswith("wgmma.mma"):
            awaited.update(results)
        elif own.operation.startswith("mov") and reads_sums:
            # A loop hands sums to its next round: the assembler gives both the same registers.
            awaited.update(results)
        elif reads_sums:
            found.append(own.text)
        else:
            awaited.difference_update(results)
    return awaited, found
