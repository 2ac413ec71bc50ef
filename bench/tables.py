"""The tables of the README and docs that are made of rows in bench/results, as Markdown."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from bench import claims

Line = Sequence[str]

LARGE = (
    "2048x2048x2048",
    "4096x4096x4096",
    "8192x8192x8192",
    "16384x16384x16384",
    "8192x28672x8192",
    "8192x8192x1024",
    "4096x14336x4096",
)
PRODUCTS = {
    "8192 cubed, NT / TN / TT": (
        "8192x8192x8192:NT",
        "8192x8192x8192:TN",
        "8192x8192x8192:TT",
    ),
    "8192 cubed, forward and both gradients": ("8192x8192x8192:both",),
    "8192 cubed, bias and gelu": ("8192x8192x8192:bias_gelu",),
    "4096 x 14336 x 4096, bias and gelu": ("4096x14336x4096:bias_gelu",),
    "4096 x 14336 x 4096, SwiGLU": ("4096x14336x4096:swiglu",),
    "8192 cubed NT, fp8 e4m3 / int8": ("8192x8192x8192:e4m3:NT", "8192x8192x8192:int8:NT"),
    "4095 / 8191 cubed: rows that are no multiple of 16 bytes": (
        "4095x4095x4095",
        "8191x8191x8191",
    ),
    "1001 cubed": ("1001x1001x1001",),
    "16 of 1024 x 4096 x 4096": ("1024x4096x4096:b16",),
}
"""The cases of each line of the table of products."""

GROUPS = {
    "16384x4096x4096:g8": "",
    "16384x14336x4096:g8": "Mixtral: ",
    "16384x4096x14336:g8": "",
    "8192x2048x7168:g32": "DeepSeek-V3: ",
    "8192x7168x2048:g32": "",
    "16384x5760x2880:g32": "gpt-oss: ",
    "16384x2880x2880:g32": "",
    "32768x768x2048:g128": "Qwen3: ",
    "32768x2048x768:g128": "",
    "16384x2048x2048:g64": "",
}
"""Products of groups, and the model that each line begins with."""


def claimed() -> str:
    """Returns the table of the README: each claim with its peer."""
    return _table(
        ["", "times as fast as", "burst", "sustained"],
        (
            [claim.product, claim.peer, claims.spread(claim.burst), claims.spread(claim.sustained)]
            for claim in claims.claims()
        ),
    )


def sources() -> str:
    """Returns the file of each claim, and how many cases it has."""
    return _table(
        ["", "times as fast as", "cases", "rows"],
        (
            [
                claim.product,
                claim.peer,
                str(max(len(claim.burst), len(claim.sustained))),
                f"`{claim.source}.csv`",
            ]
            for claim in claims.claims()
        ),
    )


def large() -> str:
    """Returns the times of plain products, with those of JAX's kernel."""
    found = {(row["case"], row["peer"]): row for row in claims.rows("h200_large")}

    def line(case: str) -> Line:
        cells = [case.replace("x", " x ")]
        for mode in ("burst", "sustained"):
            ours, jax = found[case, "ours"], found[case, "jax"]
            cells += [
                _figures(float(ours[f"{mode}_us"])),
                *(f"{float(row[f'{mode}_ratio']):.3f}" for row in (ours, jax)),
            ]
        return cells

    modes = [f"{mode} us|x XLA|JAX x XLA" for mode in ("burst", "sustained")]
    return _table(["M x N x K", *"|".join(modes).split("|")], map(line, LARGE))


def products() -> str:
    """Returns the ratios to XLA of layouts, epilogues, types, odd sizes and a batch."""
    ours = {row["case"]: row for row in claims.rows("h200_products") if row["peer"] == "ours"}

    def line(cases: Iterable[str], mode: str) -> str:
        ratios = (float(ours[case][f"{mode}_ratio"]) for case in cases)
        return " / ".join(f"{ratio:.3f}" if ratio < 2 else f"{ratio:.2f}" for ratio in ratios)

    return _table(
        ["product", "burst x XLA", "sustained x XLA"],
        (
            [name, line(cases, "burst"), line(cases, "sustained")]
            for name, cases in PRODUCTS.items()
        ),
    )


def scales() -> str:
    """Returns the times of products with scales, biases of a batch, and operands of their own."""
    return _table(
        ["product", "burst us", "x XLA", "sustained x XLA"],
        (
            [row["case"], row["ours_us"], row["burst_ratio"], row["sustained_ratio"]]
            for row in claims.noted("scales")
        ),
    )


def functions() -> str:
    """Returns the times of functions as epilogues beside the bare product and XLA's program."""
    return _table(
        ["size", "function", "us", "x bare", "x XLA"],
        (
            [
                row["size"].replace("x", " x "),
                f"`{row['function']}`",
                row["ours_us"],
                row["x_bare"],
                row["x_xla"],
            ]
            for row in claims.rows("h200_functions")
        ),
    )


def unseen() -> str:
    """Returns the ratios to torch of products of experts whose sizes were not seen before."""
    return _table(
        ["experts, unseen sizes", "times as fast as torch"],
        ([row["case"], row["burst_ratio"]] for row in claims.noted("unseen")),
    )


def symmetric() -> str:
    """Returns the times of symmetric results beside XLA's full product."""
    return _noted(["bf16", "XLA", "half", "times as fast", "sustained"], "symmetric")


def muon() -> str:
    """Returns the times of an optimiser's step."""
    return _noted(["Muon, `--preset=small`", "optax", "this package", "times as fast"], "muon")


def groups() -> str:
    """Returns the times of the products of experts: ours, torch's and those of JAX's kernels."""
    times, jax = claims.microseconds("h200_grouped"), claims.jax_groups()

    def cell(case: str) -> str:
        took = [times[case]["ours"], times[case]["torch"], *([jax[case]] if case in jax else [])]
        return " / ".join(f"{us:.0f}" for us in took)

    def line(case: str, model: str) -> Line:
        size, number = case.split(":g")
        kinds = ("", ":zipf", ":backward", ":zipf:backward")
        name = f"{model}{size.replace('x', ' x ')}, {number}"
        return [name, *(cell(case + kind) for kind in kinds)]

    lines = [line(case, model) for case, model in GROUPS.items()]
    for kind, name in (
        ("one", "one group has all rows"),
        ("empty", "half of the groups are empty"),
    ):
        case = f"16384x2048x2048:g64:{kind}"
        lines.append([f"the same, {name}", cell(case), "", cell(f"{case}:backward"), ""])
    heads = ("forward, equal", "forward, Zipf", "backward, equal", "backward, Zipf")
    return _table(["rows x n x k, groups", *heads], lines)


def tokamax() -> str:
    """Returns the times of products of experts beside tokamax, in microseconds."""
    of = claims.microseconds("h200_groups")
    peers = ("ours", "tokamax", "torch", "xla")
    return _table(
        ["rows x n x k, groups", "ours us", "tokamax us", "torch us", "`lax.ragged_dot` us"],
        (
            [f"`{case}`", *(_figures(took[peer]) for peer in peers)]
            for case, took in of.items()
            if "tokamax" in took
        ),
    )


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"claims": claimed},
    "docs/measured.md": {
        "claims": claimed,
        "sources": sources,
        "large": large,
        "products": products,
        "scales": scales,
        "tokamax": tokamax,
        "unseen": unseen,
        "functions": functions,
    },
    "docs/symmetric.md": {"symmetric": symmetric, "muon": muon},
    "docs/ideas/groups.md": {"groups": groups},
}
"""The functions that make the tables of each page, by the name that the page gives them."""

_PLACE = re.compile(
    r"(?P<open><!-- table: (?P<name>\w+), from bench/figures\.py -->\n)"
    r"(?P<table>.*?)"
    r"(?P<close><!-- end of table -->)",
    re.DOTALL,
)


def places(text: str) -> list[str]:
    """Returns the names of the tables that a page has a place for."""
    return [place["name"] for place in _PLACE.finditer(text)]


def filled(page: str, text: str) -> str:
    """Returns the text of a page with its tables made anew."""
    makers = PAGES[page]
    return _PLACE.sub(
        lambda place: f"{place['open']}\n{makers[place['name']]()}\n{place['close']}", text
    )


def _noted(heads: Line, run: str) -> str:
    def line(row: claims.Row) -> Line:
        times = (_time(float(row[column])) for column in ("peer_us", "ours_us"))
        return [row["case"], *times, row["burst_ratio"], row["sustained_ratio"]][: len(heads)]

    return _table(heads, map(line, claims.noted(run)))


def _time(us: float) -> str:
    return f"{us / 1000:.2f} ms" if us >= 1500 else f"{us:.1f} us"


def _figures(us: float) -> str:
    """Returns microseconds with one digit after the point, or none from 1000 on."""
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}"


def _table(heads: Line, lines: Iterable[Line]) -> str:
    rule = ["---"] * len(heads)
    return "".join(_line(cells) for cells in [heads, rule, *lines])


def _line(cells: Line) -> str:
    return re.sub(r" +(?=\|)", " ", f"| {' | '.join(cells)} |") + "\n"
