"""A kernel that nobody has run is taken unasked only where this computer has proven it."""

import ast
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import BlackwellConfig, explain, gemm
from pallas_gemm.api import doctor
from pallas_gemm.computer import versions
from pallas_gemm.computer.user_folder import FOLDER_VARIABLE
from pallas_gemm.device import B200, H100, H200, Device
from pallas_gemm.planning import ignored, proof, targeting
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.tuning import autotune as tuning

HOPPER, BLACKWELL = ARCHITECTURES
SQUARE = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
NOT_PROVEN = "not proven on this GPU: run python -m pallas_gemm doctor --prove"


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    yield
    proof._read.cache_clear()


def proven(gpu: Device = B200, **changes: Any) -> pathlib.Path:
    kernel = next(a.name for a in ARCHITECTURES if a.fits(gpu))
    stages = (proof.Stage("one CTA", "12 products are exact", 3.0),)
    made = proof.Proof(kernel, gpu.kind, proof.version_of(kernel), "2026-11-22", stages)
    return dataclasses.replace(made, **changes).save()


def decided(device: Device = B200, **options: Any) -> Any:
    with pallas_gemm.target(device):
        return explain(gemm, SQUARE, SQUARE, **options)


def test_until_it_is_proven_xla_computes_and_explain_says_why() -> None:
    assert decided().implementation == "xla"
    text = " ".join(str(decided()).split())
    assert "why the kernel for this GPU is not trusted" in text
    assert f"not blackwell {NOT_PROVEN}" in text
    proven()
    assert decided().implementation == "blackwell"
    assert "the kernel for this GPU, proven here on 2026-11-22" in str(decided())


def test_who_names_the_kernel_gets_it() -> None:
    for named in ({"implementation": "blackwell"}, {"config": BlackwellConfig()}):
        assert decided(**named).implementation == "blackwell"
    # An order is not the name of a kernel.
    assert decided(schedule="hilbert").implementation == "xla"


def test_a_program_for_an_unproven_gpu_has_no_kernel() -> None:
    def text(**options: Any) -> str:
        with pallas_gemm.target("b200"):
            f = jax.jit(lambda a, b: gemm(a, b, **options))
            return f.trace(SQUARE, SQUARE).lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" not in text()
    with pytest.warns(ignored.IgnoredWarning, match="no effect, because XLA .* is not trusted"):
        assert "mosaic_gpu" not in text(schedule="hilbert")
    proven()
    assert "mosaic_gpu" in text()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "of another kernel"},
        {"kernel": "hopper"},
        {"device": "NVIDIA B300"},
        {"failed": "pairs: 3 of 900 elements are wrong"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_proof_proves_nothing(changes: Any) -> None:
    path = proven(**changes)
    path.rename(proof.path_of(B200.kind))
    assert decided().implementation == "xla"
    assert (changes.get("failed") or NOT_PROVEN) in " ".join(str(decided()).split())


@pytest.mark.parametrize("damage", ["truncated", "format", "stages", "list", "binary"])
def test_a_damaged_proof_proves_nothing_and_breaks_nothing(damage: str) -> None:
    path = proven()
    document = json.loads(path.read_text())
    if damage == "truncated":
        path.write_text(path.read_text()[:-20])
    elif damage == "binary":
        path.write_bytes(b"\xff\x00")
    else:
        changed = {"format": {"format": 0}, "stages": {"stages": []}}.get(damage)
        path.write_text(json.dumps({**document, **changed} if changed else [document]))
    assert decided().implementation == "xla"
    proven()
    assert decided().implementation == "blackwell"


def test_hopper_is_trusted_as_it_is_until_it_fails() -> None:
    for device in (H200, H100):
        assert decided(device).reason == "the kernel for this GPU"
    proven(H100)
    assert decided(H100).reason == "the kernel for this GPU, proven here on 2026-11-22"
    proven(H100, failed="replays: hangs")
    assert decided(H100).implementation == "xla"
    assert "it failed on this GPU (replays: hangs)" in " ".join(str(decided(H100)).split())
    assert decided(H200).implementation == "hopper"


def test_another_version_of_jax_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    proven()
    monkeypatch.setattr(versions.jax, "__version__", "99")
    versions.of_sources.cache_clear()
    assert decided().implementation == "xla"
    versions.of_sources.cache_clear()


def test_a_kernel_is_made_of_what_it_imports() -> None:
    """It is another kernel if any of these files changes."""
    root = pathlib.Path(pallas_gemm.__file__).parents[1]
    counted = {file for pattern in proof._SHARED for file in root.glob(pattern)}
    counted |= set(root.glob("pallas_gemm/kernels/blackwell/**/*.py"))
    script = "import sys; import pallas_gemm.kernels.blackwell.kernel\n"
    script += "print([m.__file__ for n, m in sys.modules.items() if '.kernels' in n])"
    told = subprocess.check_output([sys.executable, "-c", script], text=True, cwd=root)
    files = {pathlib.Path(x) for x in ast.literal_eval(told)}
    # What callers configure the other kernel with is imported by the package.
    own = {x for x in files if x.is_relative_to(root) and "hopper" not in x.parts}
    assert own
    assert own <= counted


def test_the_version_of_a_kernel_is_its_own_sources() -> None:
    own = proof.version_of("blackwell")
    assert own != proof.version_of("hopper")
    assert own == proof.version_of("blackwell")


def test_nothing_else_runs_an_unproven_kernel_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targeting, "first_gpu", lambda: B200)
    with pytest.raises(RuntimeError, match=f"autotune runs the blackwell kernel, {NOT_PROVEN}"):
        tuning.autotune(gemm, SQUARE, SQUARE)
    run: list[str] = []
    monkeypatch.setattr(doctor, "_wrong_elements", lambda name: run.append(name) or 0)
    said = {name: outcome for name, outcome, _ in doctor._checks()}
    assert (run, said["blackwell"]) == (["xla", "interpret"], NOT_PROVEN)


def test_where_there_is_no_folder_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/dev/null/none")
    assert decided().implementation == "xla"
    with pytest.raises(OSError, match="null"):
        proven()


def test_a_proof_is_read_that_was_written_in_this_format() -> None:
    path = proof.path_of(B200.kind)
    path.parent.mkdir(parents=True)
    stage = {"name": "one CTA", "outcome": "12 products are exact", "seconds": 3.0}
    document = {"kernel": "blackwell", "device": B200.kind, "when": "2026-11-22"}
    document |= {"version": proof.version_of("blackwell"), "format": 1, "stages": [stage]}
    path.write_text(json.dumps(document))
    known = proof.found("blackwell", B200.kind)
    assert known is not None
    assert known.stages == (proof.Stage("one CTA", "12 products are exact", 3.0),)
    assert (known.failed, known.surroundings) == (None, "")
    assert proof.interrupted("blackwell", B200.kind) is None
    assert proof.why_untrusted(BLACKWELL, B200) is None
