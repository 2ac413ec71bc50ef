"""The einsums of published models, with the mesh axes that split each of their dimensions."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ACTIVATIONS = {
    "b": ("data", "fsdp", "expert"),
    "n": ("tensor",),
    "k": ("tensor",),
    "f": ("tensor",),
}
WEIGHTS = {"d": ("fsdp",), "n": ("tensor",), "k": ("tensor",), "f": ("tensor",), "v": ("tensor",)}
EXPERTS = {"b": ("data", "fsdp"), "e": ("expert",)}
"""Where there are experts, these have the axis to themselves."""

SIZES: dict[str, int] = dict.fromkeys("btsnhkec", 8)
SIZES |= {"d": 64, "f": 128, "v": 128, "g": 2, "j": 3, "i": 2, "r": 16, "p": 48}
"""Sizes of each dimension: those of the models, scaled down alike."""

MODELS = {
    # b: examples, t and s: positions, d: features, n and k: heads, g: queries of a head,
    # h: features of a head, f: hidden features, v: words or classes, e: experts,
    # c: places at an expert, r: ranks, p: pixels of a patch, j and i: three and two in one array.
    "gemma": (
        "btd,jndh->jbtnh btd,ndh->btnh btd,ikdh->ibtkh btkgh,bskh->btkgs btkgs,bskh->btkgh"
        " btnh,nhd->btd btd,idf->ibtf btd,ifd->btif btf,fd->btd btd,vd->btv"
    ),
    "llama": (
        "btd,dnh->btnh btd,dkh->btkh btd,dkgh->btkgh btkgh,bskh->bkgts bkgts,bskh->btkgh"
        " btnh,nhd->btd btd,df->btf btf,fd->btd btd,dv->btv"
    ),
    "mixtral": (
        "btd,de->bte btd,btec->ebcd ebcd,edf->ebcf ebcf,efd->ebcd ebcd,btec->btd btd,edf->btef"
        " btef,efd->bted"
    ),
    "deepseek": (
        "btd,dr->btr btr,rnh->btnh btnh,rnh->btnr btnr,bsr->bnts bnts,bsr->btnr btnr,rnh->btnh"
        " btnh,nhd->btd bnth,bnsh->bnts ebcd,edf->ebcf"
    ),
    "t5": "btd,dnh->btnh btnh,bsnh->bnts bnts,bsnh->btnh btnh,nhd->btd btd,df->btf btf,fd->btd",
    "vit": "btp,pd->btd btd,jdnh->jbtnh btnh,bsnh->bnts bnts,bsnh->btnh btnh,nhd->btd bd,dv->bv",
}

MESHES = {
    "data": {"data": 8},
    "tensor": {"tensor": 8},
    "fsdp": {"fsdp": 8},
    "expert": {"expert": 8},
    "data, tensor": {"data": 2, "tensor": 4},
    "data, fsdp": {"data": 2, "fsdp": 4},
    "data, expert": {"data": 2, "expert": 4},
    "fsdp, tensor": {"fsdp": 2, "tensor": 4},
    "fsdp, expert": {"fsdp": 2, "expert": 4},
    "tensor, expert": {"tensor": 2, "expert": 4},
}


DATA_TENSOR = {"data": 2, "tensor": 4}
EXPERT_TENSOR = {"expert": 2, "tensor": 4}
DATA_EXPERT = {"data": 2, "expert": 4}

TABLE_SIZES: dict[str, int] = dict.fromkeys("tqsc", 1024)
TABLE_SIZES |= {"a": 2, "b": 8, "d": 2048, "m": 2048, "n": 8, "e": 8, "h": 256}

TABLE: list[tuple[str, dict[str, int], tuple[P, P], dict[str, int]]] = [
    ("btd,sndh->sbtnh", DATA_TENSOR, (P("data"), P(None, "tensor")), {"s": 3}),
    ("btd,ckdh->cbtkh", DATA_TENSOR, (P("data"), P(None, "tensor")), {"c": 2, "k": 4}),
    ("btd,dgh->btgh", DATA_TENSOR, (P("data"), P(None, None, "tensor")), {"g": 2, "h": 4096}),
    ("bqnh,bknh->bnqk", DATA_TENSOR, (P("data", None, "tensor"),) * 2, {"k": 1024}),
    (
        "bnqk,bknh->bqnh",
        DATA_TENSOR,
        (P("data", "tensor"), P("data", None, "tensor")),
        {"k": 1024},
    ),
    ("bsm,emh->bseh", EXPERT_TENSOR, (P(), P("expert", None, "tensor")), {"b": 4, "h": 1024}),
    ("abtd,df->abtf", DATA_EXPERT, (P("data", "expert"), P()), {"b": 4, "f": 4096}),
    ("btd,nhd->btnh", DATA_TENSOR, (P("data"), P("tensor")), {}),
    ("btd,dkgh->btkgh", DATA_TENSOR, (P("data"), P(None, "tensor")), {"k": 4, "g": 2}),
    (
        "ebcm,emh->ebch",
        EXPERT_TENSOR,
        (P("expert"), P("expert", None, "tensor")),
        {"b": 1, "h": 1024},
    ),
]
"""The cases of `docs/parallel.md`: an einsum, its mesh, how operands are split, its sizes."""


def mesh(axes: Mapping[str, int], kind: AxisType = AxisType.Auto, devices: Any = None) -> Mesh:
    """Returns eight devices along these axes: those that JAX finds, or others."""
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """An einsum and how its operands are split.

    Attributes:
        subscripts: The einsum.
        mesh: The devices.
        specs: How each operand is split.
        sizes: The size of each dimension.
        dtype: The type of both operands.
    """

    subscripts: str
    mesh: Mesh
    specs: tuple[P, ...]
    sizes: Mapping[str, int]
    dtype: Any = np.float32

    @property
    def operands(self) -> list[str]:
        """The letters of each operand."""
        return self.subscripts.partition("->")[0].split(",")

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the operands."""
        return [
            jax.ShapeDtypeStruct(
                tuple(self.sizes[x] for x in letters),
                self.dtype,
                sharding=NamedSharding(self.mesh, spec),
            )
            for letters, spec in zip(self.operands, self.specs, strict=True)
        ]


def table(devices: Any = None) -> Iterator[Case]:
    """Yields the einsums of the table."""
    for subscripts, axes, specs, sizes in TABLE:
        own = mesh(axes, devices=devices)
        yield Case(subscripts, own, specs, TABLE_SIZES | sizes, jnp.bfloat16)


def cases(mesh: Mesh) -> list[Case]:
    """Returns the einsums of all models, those that differ in nothing but letters once."""
    every = (_of_a_model(x, mesh) for einsums in MODELS.values() for x in einsums.split())
    return list({_anonymous(case): case for case in every}.values())


def _of_a_model(subscripts: str, mesh: Mesh) -> Case:
    letters = subscripts.partition("->")[0].split(",")
    return Case(subscripts, mesh, tuple(_spec(subscripts, x, mesh) for x in letters), SIZES)


def _spec(subscripts: str, letters: str, mesh: Mesh) -> P:
    """Returns how an array is split: weights are those without examples."""
    rules = ACTIVATIONS if "b" in letters else WEIGHTS
    if "e" in subscripts:
        rules = rules | EXPERTS
    used: set[str] = set()
    dims: list[tuple[str, ...] | None] = []
    for letter in letters:
        own = [x for x in rules.get(letter, ()) if x in mesh.shape and x not in used]
        used.update(own)
        dims.append(tuple(own) or None)
    return P(*dims)


def _anonymous(case: Case) -> tuple[object, ...]:
    letters = "".join(dict.fromkeys(filter(str.isalpha, case.subscripts)))
    kind = case.subscripts.translate({ord(x): chr(ord("A") + i) for i, x in enumerate(letters)})
    return kind, *((x.shape, x.sharding.spec) for x in case.shapes())
