"""The choices of the public functions, as one table: a new one is a line here.

A case has one value of each. It says which operands there are, what calls the function with them,
and what the result has to be. Operands are so small, and so many of their elements are zeros, that
all sums, results and derivatives are exact in each type, and are compared bit for bit.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_gemm
from tests import oracle
from tests.covering import Case

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3, INT8, INT32 = jnp.float8_e4m3fn, jnp.int8, jnp.int32
DEFAULT, HIGHEST = lax.Precision.DEFAULT, lax.Precision.HIGHEST

OPTIONS: Mapping[str, Sequence[Any]] = {
    "function": (
        *("gemm", "gated_gemm", "grouped_gemm", "gated groups"),
        *("ragged_dot", "offset", "gram", "projections", "einsum"),
    ),
    # Of operands and of the result.
    "types": (
        *((BF16, BF16), (BF16, F32), (F16, F16), (F32, F32), (F32, BF16)),
        *((E4M3, BF16), (INT8, INT32)),
    ),
    "layout": ("NN", "NT", "TN", "TT"),
    # Which operands have a dimension in front.
    "batch": ("", "a", "b", "ab"),
    # Which operands `vmap` maps; those of the epilogue are "e".
    "mapped": ("", "a", "b", "u", "e", "ab", "abue"),
    "axes": ("first", "last", "various"),
    "bias": (False, True),
    "row_scale": (False, True),
    "col_scale": (False, True),
    # Right operands of four bits, with scales and perhaps the values that stand for 0.
    "weights": (None, "int4", "zeros"),
    # A number of the program, or an operand.
    "alpha": (1, 2, "operand"),
    # What it is scaled by.
    "residual": (None, 1, 2, "operand"),
    "activation": (None, "relu", "square"),
    # What follows the sums: by a word each, or as a function, which has a second result.
    "said": ("words", "function"),
    "mesh": (None, "rows", "columns", "k", "all", "explicit rows", "explicit columns"),
    "precision": (None, HIGHEST, (DEFAULT, HIGHEST)),
    "implementation": (None, "xla"),
    "derivative": (None, "forward", "reverse"),
    # What changes then: what two sums are of, or what the epilogue takes.
    "changed": ("all", "factors", "others"),
    # Where they are equal, whoever takes one dimension for another gets the right shapes.
    "sizes": ("different", "equal"),
}
PLAIN: Case = {name: values[0] for name, values in OPTIONS.items()}
EPILOGUE = {"bias", "row_scale", "col_scale", "alpha", "residual", "activation"}
KNOWS: Mapping[str, set[str]] = {
    "gemm": {"layout", "batch", "said", "weights", *EPILOGUE},
    "gated_gemm": {"layout", "batch", "weights", *EPILOGUE},
    "grouped_gemm": {"layout", "weights", *EPILOGUE - {"residual"}},
    "gated groups": {"layout", "weights", *EPILOGUE - {"residual"}},
    "ragged_dot": set(),
    "offset": set(),
    "gram": {"layout", "batch", "alpha", "residual"},
    "projections": {"layout", "batch", "bias", "activation"},
    "einsum": {"layout", "batch"},
}
"""What a function has a word for, beside what all know."""
ALL_KNOW = {"types", "mapped", "axes", "mesh", "precision", "derivative", "changed", "sizes"}
GATED = ("gated_gemm", "gated groups")
ROWS_ARE_STORED_FIRST = ("grouped_gemm", "gated groups", "projections")
IN_GROUPS = ("grouped_gemm", "gated groups", "ragged_dot", "offset")
NAMES_NO_IMPLEMENTATION = ("ragged_dot", "offset", "einsum")

ZEROS = ("col_zero", "up_zero")

SIZES: Mapping[str, dict[str, int]] = {
    "different": {"m": 4, "n": 6, "k": 8, "l": 2, "v": 3, "g": 4},
    "equal": {"m": 4, "n": 4, "k": 4, "l": 4, "v": 4, "g": 4},
}
GROUP_SIZES = np.array([1, 0, 2, 0], np.int32)
BEFORE = 1
"""Groups before those that have matrices, where there is an offset; each has a row."""


def group_of_rows(case: Case) -> np.ndarray:
    """Returns which matrix each row is multiplied with; 4 if with none."""
    return np.array([4, 0, 2, 2] if case["function"] == "offset" else [0, 2, 2, 4])


def settled(case: Case) -> Case:
    """Returns a case that says nothing that its function has no word for."""
    known = _known(case["function"])
    case = {name: value if name in known else PLAIN[name] for name, value in case.items()}
    if case["function"] == "gram":
        case["layout"] = "TN" if case["layout"][0] == "T" else "NT"
    names = operands(case)
    case["mapped"] = "".join(x for x in case["mapped"] if _group_of(x, names))
    if not case["mapped"]:
        case["axes"] = "first"
    if not case["derivative"] or (case["changed"] == "others" and not changed(case)):
        case["changed"] = "all"
    return case


def changed(case: Case) -> list[str]:
    """Returns the operands that a derivative is by."""
    wanted = {"all": (True, False), "factors": (True,), "others": (False,)}[case["changed"]]
    fixed = {"b", "u", *ZEROS} if case["weights"] else set()
    return [
        name for name in operands(case) if (name in ("a", "b", "u")) in wanted and name not in fixed
    ]


def _known(function: str) -> set[str]:
    known = {"function", *ALL_KNOW, *KNOWS[function]}
    return known if function in NAMES_NO_IMPLEMENTATION else {*known, "implementation"}


def is_legal(case: Case) -> bool:
    """Whether a case can be computed, of those that are settled."""
    function, layout = case["function"], case["layout"]
    said = {name for name in EPILOGUE if case[name] != PLAIN[name]}
    return (
        case["mapped"] in OPTIONS["mapped"]
        and not (case["types"][0] in (E4M3, INT8) and case["derivative"])
        and not (case["types"][0] == INT8 and (said or is_function(case)))
        # The two operands of a Gram matrix are one, and have one precision.
        and not (function == "gram" and isinstance(case["precision"], tuple))
        and not (case["weights"] and case["types"][0] in (E4M3, INT8))
        and not (case["weights"] and (is_function(case) or not case["col_scale"]))
        # Those of a group have a dimension more than `oracle` gives them.
        and not (case["weights"] == "zeros" and function in IN_GROUPS)
        and not (function in ROWS_ARE_STORED_FIRST and layout[0] == "T")
        and not (function in ("gram", "projections") and "b" in case["batch"])
        and not (case["mesh"] and case["implementation"])
        # There they are JAX's own, which infers no sharding.
        and not (str(case["mesh"]).startswith("explicit") and function in IN_GROUPS)
        # Rows and columns of the result would be split along one axis.
        and not (function == "gram" and case["mesh"] == "explicit rows")
    )


def is_function(case: Case) -> bool:
    """Whether what follows the sums is a function."""
    return case["said"] == "function"


def types_of_results(case: Case) -> list[Any]:
    """Returns the type of each result."""
    count = 2 if case["function"] == "projections" else 1
    return [case["types"][1]] * count + [F32] * is_function(case)


def _group_of(letter: str, names: Mapping[str, str]) -> list[str]:
    """Returns the operands that a letter of "mapped" stands for."""
    if letter == "e":
        return [name for name in names if name not in "abu"]
    return [name for name in names if name == letter]


def operands(case: Case) -> dict[str, str]:
    """Returns the dimensions of each operand by its name, without what is mapped."""
    function, batch = case["function"], case["batch"]
    in_groups = function in IN_GROUPS
    right = "nk" if case["layout"][1] == "T" else "kn"
    right = "g" + right if in_groups else "l" * ("b" in batch) + right
    found = {"a": "l" * ("a" in batch) + ("km" if case["layout"][0] == "T" else "mk")}
    if function != "gram":
        found["b"] = right
    if function in (*GATED, "projections"):
        found["u"] = right
    out = "l" * (batch != "") + ("mo" if function == "gram" else "mn")
    twice = {"bias": "up_bias", "col_scale": "up_scale"}
    for name in ("bias", "row_scale", "col_scale"):
        if case[name]:
            found[name] = "m" if name == "row_scale" else "n"
        if case[name] and function in (*GATED, "projections") and name in twice:
            # Of a group, each has its own.
            found[twice[name]] = "gn" if in_groups else "n"
    if case["weights"] == "zeros":
        found |= dict.fromkeys(ZEROS[: 1 + (function in GATED)], "n")
    if case["alpha"] == "operand":
        found["alpha"] = "g" if in_groups else ""
    if case["residual"] is not None:
        found["residual"] = out
    if case["residual"] == "operand":
        found["beta"] = ""
    return found


def mapped_axes(case: Case) -> dict[str, int | None]:
    """Returns along which axis each operand is mapped."""
    found, names = dict.fromkeys(operands(case)), operands(case)
    for letter in case["mapped"]:
        for name in _group_of(letter, names):
            rank = len(names[name])
            various = (1 + list(names).index(name)) % (rank + 1)
            found[name] = {"first": 0, "last": rank, "various": various}[case["axes"]]
    return found


def draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the operands, with what is mapped, as float64."""
    found, sizes, axes = {}, SIZES[case["sizes"]], mapped_axes(case)
    sizes = sizes | {"o": sizes["m"]}
    for name, letters in operands(case).items():
        shape = [sizes[x] for x in _with(letters, axes[name])]
        # What stands for 0 makes all weights of a column larger.
        each = 1 / 16 if name in ZEROS else 1 / 4
        found[name] = rng.choice([-1.0, 0.0, 1.0], shape, p=[each, 1 - 2 * each, each])
        if name in ("alpha", "beta", "row_scale", "col_scale", "up_scale"):
            found[name] = rng.choice([-1.0, 1.0, 2.0], shape)
        # What is added to a symmetric result is symmetric.
        found[name] = both_halves(case, name, found[name])
    return found


def both_halves(case: Case, name: str, x: np.ndarray) -> np.ndarray:
    """Returns a symmetric operand, or its gradient, plus the transposed one; others as they are.

    Of a gradient that is all that counts: it may be whole in one half, or half in both.
    """
    letters = _with(operands(case)[name], mapped_axes(case)[name])
    return x + x.swapaxes(letters.index("m"), letters.index("o")) if "o" in letters else x


def _with(letters: str, axis: int | None) -> str:
    return letters if axis is None else f"{letters[:axis]}v{letters[axis:]}"


def typed(case: Case, values: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns operands in their types."""
    given, out = case["types"]
    right = jnp.int4 if case["weights"] else given
    own = {"a": given, "b": right, "u": right, "residual": out, **dict.fromkeys(ZEROS, right)}
    return {name: jnp.asarray(x.astype(own.get(name, F32))) for name, x in values.items()}


def call(case: Case, x: Mapping[str, Any]) -> list[jax.Array]:
    """Calls the function with operands that are not mapped; returns its results."""
    function, named = case["function"], {}
    if is_function(case):
        return _call_with_function(case, x)
    names = {"bias", "row_scale", "col_scale", "up_bias", "up_scale", "residual", "beta", *ZEROS}
    names &= {*x}
    named = {name: x[name] for name in names}
    if case["alpha"] != 1:
        named["alpha"] = x.get("alpha", case["alpha"])
    if case["residual"] == 2:
        named["beta"] = 2
    if case["activation"] or function == "gated_gemm":
        named["activation"] = jnp.square if case["activation"] == "square" else case["activation"]
    if case["implementation"]:
        named["implementation"] = case["implementation"]
    named |= {"precision": case["precision"], "preferred_element_type": case["types"][1]}
    return _call(function, case, x, named)


def _call_with_function(case: Case, x: Mapping[str, Any]) -> list[jax.Array]:
    """Calls `gemm` with a function that does what the words say, and adds up rows."""
    names = [name for name in x if name not in "ab"]

    def follows(s: jax.Array, *given: jax.Array) -> list[jax.Array]:
        own = dict(zip(names, given, strict=True))
        row, columns = (1,) * (s.ndim - 1) + (-1,), (1,) * (s.ndim - 2) + (-1, 1)
        s = s * own.get("alpha", 1 if case["alpha"] == "operand" else case["alpha"])
        if case["row_scale"]:
            s = s * own["row_scale"].reshape(columns)
        if case["col_scale"]:
            s = s * own["col_scale"].reshape(row)
        if case["bias"]:
            s = s + own["bias"].reshape(row)
        s = oracle.FUNCTIONS[case["activation"]](s)
        if case["residual"] is not None:
            beta = own["beta"] if case["residual"] == "operand" else case["residual"]
            s = s + beta * own["residual"].astype(F32)
        return [s.astype(case["types"][1]), jnp.sum(s, axis=-1)]

    left, right = (side == "T" for side in case["layout"])
    named = {"transpose_a": left, "transpose_b": right, "precision": case["precision"]}
    if case["implementation"]:
        named["implementation"] = case["implementation"]
    return pallas_gemm.gemm(
        x["a"], x["b"], epilogue=follows, operands=[x[name] for name in names], **named
    )


def _call(function: str, case: Case, x: Mapping[str, Any], named: dict[str, Any]) -> list[Any]:
    left, right = (side == "T" for side in case["layout"])
    match function:
        case "gemm":
            return [pallas_gemm.gemm(x["a"], x["b"], transpose_a=left, transpose_b=right, **named)]
        case "gated_gemm":
            of_gate = {"bias": "gate_bias", "col_scale": "gate_scale", "col_zero": "gate_zero"}
            named = {of_gate.get(name, name): value for name, value in named.items()}
            flip = {"transpose_a": left, "transpose_b": right}
            return [pallas_gemm.gated_gemm(x["a"], x["b"], x["u"], **flip, **named)]
        case "grouped_gemm" | "gated groups":
            named |= {"up": x["u"]} if "u" in x else {}
            sizes = jnp.asarray(GROUP_SIZES)
            return [pallas_gemm.grouped_gemm(x["a"], x["b"], sizes, transpose_b=right, **named)]
        case "ragged_dot":
            return [pallas_gemm.ragged_dot(x["a"], x["b"], jnp.asarray(GROUP_SIZES), **named)]
        case "offset":
            sizes = jnp.asarray([*[1] * BEFORE, *GROUP_SIZES])
            named["group_offset"] = jnp.array([BEFORE])
            return [pallas_gemm.ragged_dot(x["a"], x["b"], sizes, **named)]
        case "gram":
            return [pallas_gemm.gram(x["a"], transpose=left, **named)]
        case "projections":
            biases = [x["bias"], x["up_bias"]] if case["bias"] else None
            for name in ("bias", "up_bias"):
                named.pop(name, None)
            flip = {"transpose_b": right, "activations": named.pop("activation", None)}
            both = [x["b"], x["u"]]
            return list(pallas_gemm.projections(x["a"], both, biases=biases, **flip, **named))
        case "einsum":
            letters = operands(case)
            out = "l" * (case["batch"] != "") + "mn"
            said = f"{letters['a']},{letters['b']}->{out}"
            return [pallas_gemm.einsum(said, x["a"], x["b"], **named)]
    raise AssertionError(function)


@dataclasses.dataclass(frozen=True)
class Exact:
    """Results, and for each operand how they change with each of its elements."""

    results: list[np.ndarray]
    changes: dict[str, list[np.ndarray]]


def exact(case: Case, values: Mapping[str, np.ndarray]) -> Exact:
    """Returns what a case has to give, with what is mapped in front."""
    results = [x.value[0] for x in _exact(case, values, "")]
    if not case["derivative"]:
        return Exact(results, {})
    changes = {}
    for name in changed(case):
        x = values[name]
        found = [own.change for own in _exact(case, values, name)]
        # One result may not depend on it.
        changes[name] = [np.broadcast_to(own, (x.size, *own.shape[1:])) for own in found]
    return Exact(results, changes)


def _exact(case: Case, values: Mapping[str, np.ndarray], moves: str) -> list[oracle.Moving]:
    axes, letters, group = mapped_axes(case), operands(case), group_of_rows(case)
    gram, in_groups = case["function"] == "gram", case["function"] in IN_GROUPS
    wanted = {"a": "vlmk", "b": "vlkn", "u": "vlkn"}
    x = {}
    for name, value in values.items():
        own, goal = _with(letters[name], axes[name]), wanted.get(name, "vlmo" if gram else "vlmn")
        if "g" in own:
            goal = "vg" + (goal[2:] if name in "bu" else goal[3:])
        x[name] = oracle.moving(value, own, goal, moves=name == moves)
        if "g" in own and name not in "bu":
            x[name] = oracle.of_rows(x[name], group).each(lambda each: each[:, :, None])
    rights = [x["a"].each(lambda each: each.swapaxes(-1, -2))] if gram else []
    for zero, name in zip(ZEROS, "bu", strict=True):
        x |= {name: x[name] + x[zero].times(-1)} if zero in x else {}
    rights += [x[name] for name in "bu" if name in x]
    if in_groups:
        times = functools.partial(oracle.product_of_rows, x["a"], group=group, groups=4)
        sums = [times(right) for right in rights]
    else:
        sums = [x["a"] @ right for right in rights]
    if case["function"] == "projections":
        own = [{"bias": x[name]} if name in x else {} for name in ("bias", "up_bias")]
        found = [
            oracle.finished([total], case, each) for total, each in zip(sums, own, strict=True)
        ]
    else:
        found = [oracle.finished(sums, case, x)]
    if in_groups:
        found = [each.times((group < 4)[:, None]) for each in found]
    found = [_as_given(case, each, axes) for each in found]
    if is_function(case):
        found.append(found[0].each(lambda each: each.sum(-1)))
    return found


def _as_given(case: Case, result: oracle.Moving, axes: Mapping[str, Any]) -> oracle.Moving:
    """Returns a result with the dimensions that it is to have."""
    sizes = SIZES[case["sizes"]]
    lead = [sizes["v"]] if set(axes.values()) != {None} else []
    batch = [sizes["l"]] if case["batch"] else []
    cols = sizes["m"] if case["function"] == "gram" else sizes["n"]

    def shaped(x: np.ndarray) -> np.ndarray:
        whole = (x.shape[0], sizes["v"] if lead else 1, sizes["l"] if batch else 1)
        x = np.broadcast_to(x, (*whole, sizes["m"], cols))
        return x.reshape(x.shape[0], *lead, *batch, sizes["m"], cols)

    return result.each(shaped)


def make_mesh(name: str) -> jax.sharding.Mesh:
    """Returns the mesh of a case: two by two devices."""
    kind = AxisType.Explicit if name.startswith("explicit") else AxisType.Auto
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))


SPLIT = {
    "rows": {"m": "x"},
    "columns": {"n": "y"},
    "k": {"k": "y"},
    "all": {"m": "x", "k": "y", "g": "x"},
}
"""Which axis of the mesh splits which dimension."""


def sharding(case: Case, mesh: Any, name: str) -> NamedSharding:
    """Returns how an operand is split."""
    letters = _with(operands(case)[name], mapped_axes(case)[name])
    split = SPLIT[case["mesh"].removeprefix("explicit ")]
    used = [split.get(letter) for letter in letters]
    # An axis splits one dimension.
    spec = [axis if axis not in used[:i] else None for i, axis in enumerate(used)]
    return NamedSharding(mesh, PartitionSpec(*spec))
