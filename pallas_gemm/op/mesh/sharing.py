"""Which dimension of a product each axis of a mesh is to split: arithmetic, without a word to XLA.

Where operands and result agree about an axis, that is settled: nothing has to be sent but sums.
Where they do not, every choice is weighed by what it sends and what is computed twice. Among the
choices are those of XLA's own product. An operand is gathered, or a part of each is exchanged. Or
partial sums are added up, or all devices along an axis compute the same.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from pallas_gemm.call import Call, Signature
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import resharding
from pallas_gemm.op.mesh.mesh_axes import Split, sums_dtype
from pallas_gemm.op.mesh.resharding import Axes, Placement


@functools.lru_cache(maxsize=4096)
def share_out(
    call: Call,
    contraction: Contraction,
    signature: Signature,
    mesh: Mesh,
    wanted: tuple[Placement, ...],
) -> tuple[Split, float]:
    """Gives each axis of the mesh to the dimension that costs least.

    Args:
        call: The product.
        contraction: Its dimensions.
        signature: Shapes and types of the whole operands.
        mesh: The devices.
        wanted: How the operands come, and how the result is wanted.

    Returns:
        The dimension that each axis splits, and the bytes that then arrive at each device.
    """
    plans = _Plans(call, contraction, signature, mesh, wanted)
    choices = plans.choices()
    settled = {unit: own[0] for unit, own in choices.items()}
    open_units = [unit for unit, own in choices.items() if len(own) > 1]
    every = itertools.product(*(choices[unit] for unit in open_units))
    found = [settled | dict(zip(open_units, own, strict=True)) for own in every]
    if call.options.parts:
        # A sum whose parts are promised is one device's.
        whole = [plan for plan in found if not plans.split(plan).contracted]
        found = whole or found
    best = min(found, key=plans.cost) if len(found) > 1 else found[0]
    split = plans.split(plans.with_idle_axes(best))
    return split, plans.received(split)


Assignment = Mapping[Axes, str | None]
"""The dimension that axes split; None if every device along them computes the same."""

FLOPS_OF_A_BYTE = 2000
"""What a GPU computes while it receives a byte: H200s of one computer, and bfloat16."""


class _Plans:
    """Ways to share out a product, and what each costs."""

    def __init__(
        self,
        call: Call,
        contraction: Contraction,
        signature: Signature,
        mesh: Mesh,
        wanted: Sequence[Placement],
    ) -> None:
        """Takes the arguments of `share_out`."""
        self.call, self.contraction, self.signature = call, contraction, signature
        self.mesh, self.wanted = mesh, wanted
        self.letters = contraction.of_operands(call)
        self.sizes = contraction.sizes(signature[0][0], signature[1][0])
        elements = math.prod(self.sizes[x] for x in contraction.out)
        count = 1 + call.epilogue.gated
        self.flops = 2 * count * math.prod(self.sizes.values())
        self.sums = elements * count * sums_dtype(call, signature).itemsize
        self.bytes = [math.prod(shape) * dtype.itemsize for shape, dtype in signature]
        self.bytes.append(elements * call.out_dtype.itemsize)
        self.uses = {
            axis: tuple(
                next((x for x, dim in zip(own, placement, strict=True) if axis in dim), None)
                for placement, own in zip(wanted, self.letters, strict=True)
            )
            for axis in mesh.axis_names
        }
        self.idle = tuple(axis for axis, uses in self.uses.items() if not any(uses))

    def choices(self) -> dict[Axes, list[str | None]]:
        """Returns the dimensions that come into question for the axes that are used."""
        order = [axis for placement in self.wanted[::-1] for dim in placement for axis in dim]
        units: dict[tuple[str | None, ...], Axes] = {}
        for axis in dict.fromkeys(order):
            units[self.uses[axis]] = (*units.get(self.uses[axis], ()), axis)
        found = {unit: self._choices_of(uses) for uses, unit in units.items()}
        contested = [unit for uses, unit in units.items() if len({*uses} - {None}) > 1]
        if len(contested) == 1 and (taken := self._taken_over_by_idle_axes(*contested)):
            found[self.idle] = [*filter(self._idle_axes_divide, self.contraction.out), taken]
        return found

    def _choices_of(self, uses: tuple[str | None, ...]) -> list[str | None]:
        if uses[0] == uses[1] and uses[0] is not None and uses[0] in self.contraction.contracted:
            dims = [own.index(uses[0]) for own in self.letters[:2]]
            first, second = (x[dim] for x, dim in zip(self.wanted, dims, strict=False))
            if first == second:
                # Never gathered, whatever is wanted of the result.
                return [uses[0]]
        # The result's own dimension comes first, and is taken if another is only as good.
        found = list(dict.fromkeys(use for use in reversed(uses) if use))
        return list(found) if set(uses) == {found[0]} else [*found, None]

    def _taken_over_by_idle_axes(self, unit: Axes) -> str | None:
        """Returns the contracted dimension that XLA would let idle axes split, if there is one.

        These axes split it in one operand alone, and rows or columns of the other one and of the
        result. XLA hands the operand's parts over to the idle axes then, and adds up sums. It is
        one of the choices, as are others that compute as little: none may send more than it does.
        """
        dims, (left, right, *_, result) = self.contraction, self.uses[unit[0]]
        for side, x, other, free in ((0, left, right, dims.columns), (1, right, left, dims.rows)):
            if x and other and x in dims.contracted and other in free and result in (other, None):
                return x if self._is_handed_over(unit, side, x, free) else None
        return None

    def _is_handed_over(self, unit: Axes, side: int, x: str, free: str) -> bool:
        """Whether XLA lets idle axes split an operand, and does not gather it then.

        Args:
            unit: The axes that split the operand.
            side: 0 for the left operand, 1 for the right one.
            x: The dimension that they split.
            free: The dimensions that the result has of the other operand alone.
        """
        sizes = self.mesh.shape
        other = zip(self.letters[1 - side], self.wanted[1 - side], strict=True)
        parts, idle = resharding.count((unit,), sizes), resharding.count((self.idle,), sizes)
        along = resharding.count(tuple(axes for letter, axes in other if letter in free), sizes)
        if idle % parts or self.sizes[x] % idle or parts not in (idle, along):
            return False
        operand = self.bytes[side] * parts / resharding.count(self.wanted[side], sizes)
        sums = self.sums / resharding.count(self.wanted[-1], sizes)
        return operand > (sums if self.uses[unit[0]][-1] else sums / parts)

    def _idle_axes_divide(self, x: str) -> bool:
        """Whether the parts of a dimension can be split along idle axes."""
        others = tuple(axis for axis, uses in self.uses.items() if x in uses)
        return self.sizes[x] % resharding.count((self.idle, others), self.mesh.shape) == 0

    def cost(self, plan: Assignment) -> float:
        """Returns the time that a plan takes, in products and additions."""
        split = self.split(plan)
        cost = FLOPS_OF_A_BYTE * self.received(split) + self.flops / split.devices
        # What is gathered for a product is often gathered for its gradients too, and only once.
        return cost if all(map(self._follows, plan, plan.values())) else 2 * cost

    def _follows(self, unit: Axes, x: str | None) -> bool:
        """Whether axes split the dimension that two of both operands and the result agree on."""
        left, right, *_, result = self.uses[unit[0]]
        agreed = left if left in (right, result) else right if right == result else None
        return agreed in (None, x)

    def received(self, split: Split) -> float:
        """Returns the bytes that arrive at each device."""
        *operands, computed = split.placements(self.call)
        total = sum(map(self._moved, self.bytes, self.wanted, operands))
        result = split.placement(self.contraction.out, scattered=False)
        parts = self.sums / resharding.count(result, self.mesh.shape)
        every, scattered = split.size(split.contracted), split.size(split.scattered_axes)
        # Reduced and scattered first, and what is left for all.
        total += parts / scattered * (scattered - 1)
        total += 2 * parts / scattered * (1 - scattered / every)
        return total + self._moved(self.bytes[-1], computed, self.wanted[-1])

    def _moved(self, size: float, before: Placement, after: Placement) -> float:
        """Returns the bytes of an array that arrive at each device for it to be split anew."""
        steps = resharding.steps(before, after, tuple(self.mesh.shape.items()))
        return size * resharding.received(before, steps, self.mesh.shape)

    def with_idle_axes(self, plan: Assignment) -> Assignment:
        """Lets axes that split nothing split sums that fewer devices scatter, if no more is sent.

        Devices then scatter less, and gather what the others along these axes have added up.
        """
        split = self.split(plan)
        shared = self.idle in plan
        if shared or not 1 < split.size(split.scattered_axes) < split.size(self.idle):
            return plan
        for x in self.contraction.out:
            more = {**plan, self.idle: x}
            other = self.split(more)
            whole = self.sizes[x] % other.size(other.axes[x] + other.scattered[x]) == 0
            if whole and self.received(other) <= self.received(split):
                return more
        return plan

    def split(self, plan: Assignment) -> Split:
        """Returns what a plan makes of the product."""
        axes: dict[str, Axes] = dict.fromkeys(self.sizes, ())
        summed: dict[str, Axes] = dict.fromkeys(self.contraction.out, ())
        for unit, x in plan.items():
            if x is None:
                continue
            axes[x] += unit
            wanted = self.uses[unit[0]][-1]
            if x in self.contraction.contracted and wanted:
                summed[wanted] += unit
        axes = {x: self._in_order(x, own) for x, own in axes.items()}
        scattered = {
            x: own
            if self.sizes[x] % math.prod(self.mesh.shape[a] for a in (*axes[x], *own)) == 0
            else ()
            for x, own in summed.items()
        }
        return Split(self.contraction, self.mesh, axes, scattered)

    def _in_order(self, letter: str, axes: Axes) -> Axes:
        """Returns the axes of a dimension in the order that most of the bytes have them in."""
        votes: dict[Axes, float] = {axes: 0.0}
        for own, placement, size in zip(self.letters, self.wanted, self.bytes, strict=True):
            there = placement[own.index(letter)] if letter in own else ()
            if set(there) == set(axes):
                votes[there] = votes.get(there, 0.0) + size
        return max(votes, key=lambda order: votes[order])
