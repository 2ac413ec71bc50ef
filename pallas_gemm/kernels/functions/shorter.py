"""A program in fewer instructions.

    x * y + z          one instruction, which rounds once
    c1 * (c2 * x)      numbers are multiplied beforehand, and so in c1 * (c2 + x)
    x + c * x**3       x * (1 + c * x**2) where x**2 is computed anyway; a number times that is
                       multiplied beforehand
    x * y + c * y      y * (x + c), where x is a product
    1 - tanh(x)**2     (1 + tanh(x)) * (2 - (1 + tanh(x))), which is precise for large x
    1 + tanh(x)        2 / (1 + exp(-2 x)): four instructions, without a branch for small x; and as
                       many for half of it, or other powers of two. Where tanh may be approximated,
                       it is one instruction

The last errs by a little more than the rounding of 1 + tanh(x). It takes the place of tanh(x)
where every use of that adds it, or its square, to a number: elsewhere tanh stays precise for small
numbers. Elements that are stored in float32 keep tanh, since each is compared with XLA's.
"""

import collections
import functools
import math
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.kernels.functions.saturating import saturating
from pallas_gemm.program import Constant, Program, Step

FMA = core.Primitive("fma")
"""x * y + z; `signs` are the numbers, 1 or -1, by which x * y and z are multiplied."""
ONE_PLUS_TANH = core.Primitive("one_plus_tanh")
"""times * (1 + tanh(scale * x))."""

_FLOAT32 = np.dtype(np.float32)
_OF_EXPONENT = Constant(-2 * math.log2(math.e), _FLOAT32)
"""1 + tanh(x) takes the power of 2 to this times x."""
_LARGEST = 1e30
"""Of the numbers that are multiplied beforehand: the product is far from where float32 ends."""


@functools.lru_cache(maxsize=1024)
def shorter(program: Program) -> Program:
    """Returns a program that computes the same in fewer instructions, as far as that is known."""
    return _Shortened(saturating(program)).program()


class _Shortened:
    """A program as it is made anew, step by step; values keep their numbers until the end."""

    def __init__(self, program: Program) -> None:
        self._old = program
        self._first = program.sums + len(program.operands)
        self._stored_wide = program.wide(lambda own: not own.reduction)
        self._types: dict[int, np.dtype] = dict.fromkeys(range(program.sums), program.sum_dtype)
        for i, own in enumerate(program.operands, program.sums):
            # A number is no array, which the instructions take.
            self._types[i] = own.dtype if own.kind else np.dtype(np.void)
        self._same: dict[int, Any] = {}
        self._made: dict[int, Step] = {}
        self._next = self._first + len(program.steps)
        steps = list(enumerate(program.steps, self._first))
        for number, step in steps:
            self._types[number] = self._type(step)
            self._same[number] = self._unscaled(step) if self._is_float(number) else None
        self._users: dict[int, list[int]] = collections.defaultdict(list)
        for number, step in steps:
            for x in step.inputs:
                if self._same[number] is None and isinstance(own := self._final(x), int):
                    self._users[own].append(number)
        self._kept = {self._final(result.value) for result in program.results}
        for number, step in steps:
            if self._same[number] is None:
                own = step._replace(inputs=tuple(map(self._final, step.inputs)))
                self._made[number] = self._shortened(number, own)

    def program(self) -> Program:
        """Returns the program, without steps that nothing uses any more."""
        wanted = [x for x in self._kept if isinstance(x, int)]
        used: set[int] = set()
        while wanted:
            if (number := wanted.pop()) not in used:
                used.add(number)
                wanted += self._inputs(number)
        order: list[int] = []
        for number in sorted(used & self._made.keys()):
            self._put(number, order)
        return self._old.with_steps({x: self._made[x] for x in order}, self._final)

    def _put(self, number: int, order: list[int]) -> None:
        """Puts a step after those that it uses."""
        for x in self._inputs(number):
            if x in self._made:
                self._put(x, order)
        if number not in order:
            order.append(number)

    def _inputs(self, number: int) -> list[int]:
        step = self._made.get(number)
        inputs = step.inputs if step else ()
        return [own for x in inputs if isinstance(own := self._final(x), int)]

    def _type(self, step: Step) -> np.dtype:
        """Returns the type of what a step computes, if it is float32; else any other."""
        params = dict(step.params)
        if "new_dtype" in params:
            return np.dtype(params["new_dtype"])
        own = {x.dtype if isinstance(x, Constant) else self._types[x] for x in step.inputs}
        name = step.primitive.name
        return _FLOAT32 if own == {_FLOAT32} and name in _ARITHMETIC else np.dtype(np.void)

    def _is_float(self, number: int) -> bool:
        return self._types[number] == _FLOAT32

    def _final(self, x: Any) -> Any:
        while isinstance(x, int) and (same := self._same.get(x)) is not None:
            x = same
        return x

    def _unscaled(self, step: Step) -> Any:
        """Returns x of 1 * x."""
        if step.primitive is lax.mul_p:
            for one, other in (step.inputs, step.inputs[::-1]):
                if isinstance(one, Constant) and one.value == 1 and isinstance(other, int):
                    return other
        return None

    def _added(self, step: Step, number: int) -> int:
        """Adds a step that one with a number uses, and returns its own."""
        self._made[self._next] = step
        self._types[self._next] = self._types[number]
        self._users[self._next] = [number]
        self._next += 1
        return self._next - 1

    def _alone(self, x: Any, *primitives: core.Primitive) -> Step | None:
        """Returns the step that computes x for one user, if it is one of these."""
        if isinstance(x, int) and len(self._users[x]) == 1 and x not in self._kept:
            step = self._made.get(x)
            if step is not None and step.primitive in primitives and self._is_float(x):
                return step
        return None

    def _shortened(self, number: int, step: Step) -> Step:
        if not self._is_float(number):
            return step
        rules = {
            lax.mul_p: self._multiplied,
            lax.add_p: self._added_up,
            lax.sub_p: self._subtracted,
        }
        if not self._old.is_coarse:
            rules[lax.tanh_p] = self._tangent
        shorten = rules.get(step.primitive)
        return step if shorten is None else shorten(number, step) or step

    def _multiplied(self, number: int, step: Step) -> Step | None:
        """c1 * (c2 * x), c1 * (c2 + x), c1 * (c2 * x + c3) and c * (1 + tanh(x))."""
        if (pair := _number_first(step.inputs)) is None:
            return None
        c, inner = pair
        if whole := self._times(number, c, inner):
            return whole
        if (own := self._alone(inner, lax.mul_p, lax.add_p)) and (
            pair := _number_first(own.inputs)
        ):
            both = _product(c, pair[0])
            if both is not None and own.primitive is lax.mul_p:
                return step._replace(inputs=(both, pair[1]))
            return None if both is None or number in self._stored_wide else _fma(c, pair[1], both)
        # The product of two numbers is rounded: a result of 32 bits that is a small rest would err.
        return None if number in self._stored_wide else self._times_first(c, inner, number)

    def _times_first(self, c: Constant, inner: Any, number: int) -> Step | None:
        """Returns c * (c2 * y + c3), or x times that, where c is multiplied beforehand."""
        if own := self._alone(inner, lax.mul_p):
            for x, y in (own.inputs, own.inputs[::-1]):
                if linear := self._linear(c, y):
                    return Step(lax.mul_p, (), (x, self._added(linear, number)))
        return self._linear(c, inner)

    def _linear(self, c: Constant, x: Any) -> Step | None:
        """Returns c * (c2 * y + c3) in one instruction, if that is what x is."""
        own = self._alone(x, FMA)
        if own is None or dict(own.params)["signs"] != (1, 1):
            return None
        factor, y, added = own.inputs
        if not isinstance(factor, Constant) or not isinstance(added, Constant):
            return None
        first, last = _product(c, factor), _product(c, added)
        return None if first is None or last is None else _fma(first, y, last)

    def _added_up(self, number: int, step: Step) -> Step | None:
        """X * y + z, and 1 + tanh(x)."""
        for z, x in (step.inputs, step.inputs[::-1]):
            if isinstance(z, Constant) and z.value == 1 and (whole := self._beside.get(x)):
                self._same[number] = whole
                return step
            if linear := self._cubic(number, z, x):
                return Step(lax.mul_p, (), (z, linear))
            if whole := self._shared(number, z, x):
                return whole
            if (factors := self._factors(x)) and self._is_array(z):
                return _fma(*factors, z)
        return None

    def _cubic(self, number: int, x: Any, other: Any) -> int | None:
        """Returns 1 + c * x**2, if c * x**3 is to be added to x and the program has x**2 anyway."""
        own = self._alone(other, lax.mul_p)
        pair = own and _number_first(own.inputs)
        if not pair or not (cube := self._alone(pair[1], lax.integer_pow_p)):
            return None
        if cube.inputs != (x,) or dict(cube.params)["y"] != 3:
            return None
        square = Step(lax.integer_pow_p, (("y", 2),), (x,))
        known = (i for i, step in enumerate(self._old.steps, self._first) if self._is(step, square))
        made = next(known, None)
        if made is None:
            return None
        return self._added(_fma(pair[0], made, Constant(1.0, _FLOAT32)), number)

    def _is(self, step: Step, other: Step) -> bool:
        return step._replace(inputs=tuple(map(self._final, step.inputs))) == other

    def _shared(self, number: int, one: Any, other: Any) -> Step | None:
        """Returns y * (x1 * x2 + c) of x1 * x2 * y + c * y, whatever the order of factors."""
        scaled = self._alone(one, lax.mul_p)
        if not scaled or not (pair := _number_first(scaled.inputs)):
            return None
        (c, y), factors = pair, self._all_factors(other)
        if len(factors) < 3 or factors.count(y) != 1:
            return None
        factors.remove(y)
        first, *others = factors
        rest = functools.reduce(
            lambda x, z: self._added(Step(lax.mul_p, (), (x, z)), number), others
        )
        return Step(lax.mul_p, (), (y, self._added(_fma(first, rest, c), number)))

    def _all_factors(self, x: Any) -> list[Any]:
        """Returns the factors of a product, and of products within it that nothing else uses."""
        own = self._alone(x, lax.mul_p)
        if own is None or not all(map(self._is_array, own.inputs)):
            return [x]
        return [factor for each in own.inputs for factor in self._all_factors(each)]

    def _subtracted(self, number: int, step: Step) -> Step | None:
        """X * y - z, and z - x * y."""
        x, y = step.inputs
        if isinstance(x, Constant) and x.value == 1 and (whole := self._squared(y)):
            left = _fma(whole, Constant(1.0, _FLOAT32), Constant(2.0, _FLOAT32), signs=(-1, 1))
            return Step(lax.mul_p, (), (whole, self._added(left, number)))
        if (factors := self._factors(y)) and self._is_array(x):
            return _fma(*factors, x, signs=(-1, 1))
        if (factors := self._factors(x)) and self._is_array(y):
            return _fma(*factors, y, signs=(1, -1))
        return None

    def _squared(self, x: Any) -> int | None:
        """Returns 1 + tanh(y), if x is the square of tanh(y) and nothing else uses it."""
        factors = self._factors(x)
        return self._beside.get(factors[0]) if factors and factors[0] == factors[1] else None

    def _is_array(self, x: Any) -> bool:
        return isinstance(x, Constant) or self._is_float(x)

    def _factors(self, x: Any) -> tuple[Any, Any] | None:
        """Returns the factors of a product that nothing else uses."""
        if own := self._alone(x, lax.mul_p):
            x, y = own.inputs
            return (x, y) if self._is_array(x) and self._is_array(y) else None
        if (own := self._alone(x, lax.integer_pow_p)) and dict(own.params)["y"] == 2:
            return own.inputs[0], own.inputs[0]
        return None

    def _tangent(self, number: int, step: Step) -> Step | None:
        """tanh(x) as 1 + tanh(x) and the 1 that is taken off again."""
        is_seen = number in self._kept or number in self._stored_wide
        if is_seen or not self._is_only_added(number):
            return None
        (x,), scale = step.inputs, 1.0
        if (own := self._alone(x, lax.mul_p)) and (pair := _number_first(own.inputs)):
            scale, x = float(pair[0].value), pair[1]
        elif ready := self._times_first(_OF_EXPONENT, x, number):
            scale, x = 1 / _OF_EXPONENT.value, self._added(ready, number)
        params = (("scale", scale), ("times", 1.0))
        whole = self._added(Step(ONE_PLUS_TANH, params, (x,)), number)
        self._beside[number] = whole
        return _fma(whole, Constant(1.0, _FLOAT32), Constant(-1.0, _FLOAT32))

    def _times(self, number: int, c: Constant, inner: int) -> Step | None:
        """Returns c * (1 + tanh(x)) as one step, if it has no other use and c rounds nothing."""
        tangents = [x for x, whole in self._beside.items() if whole == inner]
        adds = [user for x in tangents for user in self._users[x]]
        alone = len(adds) == 1 and self._same[adds[0]] == inner and adds[0] not in self._kept
        exact = c.value > 0 and math.frexp(float(c.value))[0] == 0.5
        if not alone or self._users[adds[0]] != [number] or not exact:
            return None
        scale = dict(self._made[inner].params)["scale"]
        params = (("scale", scale), ("times", float(c.value)))
        return self._made[inner]._replace(params=params)

    @functools.cached_property
    def _beside(self) -> dict[Any, int]:
        """The number of 1 + x for values x."""
        return {}

    def _is_only_added(self, number: int, squared: bool = False) -> bool:
        """Whether all that uses a value, or its square, adds it to a number that is no smaller."""
        return all(self._adds(user, number, squared) for user in self._users[number])

    def _adds(self, user: int, number: int, squared: bool) -> bool:
        step = self._old.steps[user - self._first]
        inputs = [self._final(x) for x in step.inputs]
        if step.primitive in (lax.add_p, lax.sub_p):
            return any(isinstance(x, Constant) and abs(x.value) >= 1 for x in inputs)
        is_square = inputs == [number] * 2 or dict(step.params).get("y") == 2
        if squared or step.primitive not in (lax.mul_p, lax.integer_pow_p) or not is_square:
            return False
        return user not in self._kept and self._is_only_added(user, squared=True)


_ARITHMETIC = frozenset(
    ("abs", "add", "div", "exp", "integer_pow", "logistic", "max", "min", "mul", "neg", "sub")
) | {"rsqrt", "sqrt", "tanh"}
"""Operations whose results have the type of what they take."""


def _fma(x: Any, y: Any, z: Any, signs: tuple[int, int] = (1, 1)) -> Step:
    return Step(FMA, (("signs", signs),), (x, y, z))


def _number_first(inputs: Any) -> tuple[Constant, Any] | None:
    """Returns a number and what is multiplied by it, or added to it; None if there are not both."""
    one, other = inputs
    if isinstance(other, Constant):
        one, other = other, one
    return (one, other) if isinstance(one, Constant) and isinstance(other, int) else None


def _product(one: Constant, other: Constant) -> Constant | None:
    """Returns the product of two numbers; None where it is too large or small to be made first."""
    found = float(one.value) * float(other.value)
    is_usual = 1 / _LARGEST < abs(found) < _LARGEST and math.isfinite(found)
    return Constant(float(np.float32(found)), _FLOAT32) if is_usual else None
