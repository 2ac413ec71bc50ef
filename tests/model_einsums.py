"""The einsums of published models, with the mesh axes that split each of their dimensions."""

import dataclasses

import jax
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


def mesh(name: str, kind: AxisType = AxisType.Auto) -> Mesh:
    """Returns eight devices along these axes."""
    axes = MESHES[name]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


@dataclasses.dataclass(frozen=True)
class Case:
    """An einsum and how its operands are split."""

    subscripts: str
    mesh: Mesh

    @property
    def operands(self) -> list[str]:
        """The letters of each operand."""
        return self.subscripts.partition("->")[0].split(",")

    def spec(self, letters: str) -> P:
        """Returns how an array is split: weights are those without examples."""
        rules = ACTIVATIONS if "b" in letters else WEIGHTS
        if "e" in self.subscripts:
            rules = rules | EXPERTS
        used: set[str] = set()
        dims = []
        for letter in letters:
            own = [x for x in rules.get(letter, ()) if x in self.mesh.shape and x not in used]
            used.update(own)
            dims.append(tuple(own) or None)
        return P(*dims)

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the operands."""
        return [
            jax.ShapeDtypeStruct(
                tuple(SIZES[x] for x in letters),
                np.float32,
                sharding=NamedSharding(self.mesh, self.spec(letters)),
            )
            for letters in self.operands
        ]


def cases(mesh: Mesh) -> list[Case]:
    """Returns the einsums of all models, those that differ in nothing but letters once."""
    every = (Case(x, mesh) for einsums in MODELS.values() for x in einsums.split())
    return list({_anonymous(case): case for case in every}.values())


def _anonymous(case: Case) -> tuple[object, ...]:
    letters = "".join(dict.fromkeys(filter(str.isalpha, case.subscripts)))
    kind = case.subscripts.translate({ord(x): chr(ord("A") + i) for i, x in enumerate(letters)})
    return kind, *((x.shape, x.sharding.spec) for x in case.shapes())
