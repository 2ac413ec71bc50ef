"""PyTorch, Triton and quack as peers: products of tensors of torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench.peer import Candidate, Runner, missing
from bench.products import Operands, Results, operand_shapes
from bench.shapes import Case


class Torch:
    """PyTorch's own product: cuBLAS by its heuristics."""

    name = "torch"
    threads = False

    def absent(self) -> str | None:
        """Returns why it cannot be used here, or None."""
        if reason := missing("torch", "torch"):
            return reason
        torch = _torch()

        return None if torch.cuda.is_available() else "this torch has no CUDA"

    def refusal(self, case: Case) -> str | None:
        """Returns why it cannot compute a case, or None."""
        if case.groups and case.dtype != "bf16":
            return "its grouped product takes bfloat16 only"
        if case.scales == "blocks":
            return None
        if case.dtype not in ("bf16", "f16", "f32"):
            return "its @ takes no 8-bit types"
        return None

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns the one way that a user would write."""
        return [Candidate("", lambda: torch_formula(case))]

    def adopt(self, operands: Operands) -> Any:
        """Returns views of the operands as tensors."""
        torch = _torch()

        # XLA multiplies float32 in TF32 unless told otherwise; so does torch then.
        torch.backends.cuda.matmul.allow_tf32 = True
        tensors = {name: _tensor(x) for name, x in operands.items()}
        if "row_scale" in tensors:
            # It takes scales whose rows follow each other, and of those of blocks whose columns do.
            for name in ("row_scale", "col_scale"):
                tensors[name] = tensors[name].t().contiguous().t()
        if "sizes" in tensors:
            # It takes where groups end.
            tensors["ends"] = torch.cumsum(tensors["sizes"], 0, dtype=torch.int32)
        return tensors

    def wait(self, results: Any) -> None:  # noqa: ARG002 - waits for everything
        """Returns when all that was launched has been computed."""
        torch = _torch()

        torch.cuda.synchronize()

    def export(self, results: Any) -> Results:
        """Returns views of the results as JAX arrays."""
        return tuple(jnp.from_dlpack(result.contiguous()) for result in results)


class Triton(Torch):
    """Triton's kernels: torch.compile with its own library ruled out."""

    name = "triton"

    def absent(self) -> str | None:
        """Returns why it cannot be used here, or None."""
        return super().absent() or missing("triton", "triton")

    def refusal(self, case: Case) -> str | None:
        """Returns why it cannot compute a case, or None."""
        if case.scales == "blocks":
            return "its products take no scales of blocks"
        return "no groups" if case.groups else super().refusal(case)

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns the compiled program; its first call autotunes, which takes a while."""

        def build() -> Runner:
            torch = _torch()
            inductor: Any = importlib.import_module("torch._inductor.config")

            inductor.max_autotune_gemm_backends = "TRITON"
            return torch.compile(
                torch_formula(case), mode="max-autotune-no-cudagraphs", dynamic=False
            )

        return [Candidate("", build)]


class Quack(Torch):
    """quack's CuTe kernels, tuned by quack."""

    name = "quack"

    def absent(self) -> str | None:
        """Returns why it cannot be used here, or None."""
        return super().absent() or missing("quack", "quack-kernels")

    def refusal(self, case: Case) -> str | None:
        """Returns why it cannot compute a case, or None."""
        if case.dtype not in ("bf16", "f16"):
            return "16-bit types only"
        if not case.is_bare:
            return "a bare product only"
        aligned = all(shape.shape[-1] % 8 == 0 for shape in operand_shapes(case).values())
        return None if aligned and case.n % 8 == 0 else "rows must be multiples of 16 bytes"

    def candidates(self, case: Case) -> Sequence[Candidate]:
        """Returns the tuned product; its first call tunes."""

        def build() -> Runner:
            gemm: Any = importlib.import_module("quack.gemm_interface").gemm

            def run(operands: Mapping[str, Any]) -> Any:
                return (gemm(*_upright_tensors(case, operands["a"], operands["b"]), tuned=True),)

            return run

        return [Candidate("", build)]


def torch_formula(case: Case) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a case as a user of torch writes it."""
    torch = _torch()

    def multiply(operands: Mapping[str, Any], a: Any, b: Any) -> Any:
        if case.groups:
            return torch._grouped_mm(a, b, offs=operands["ends"])  # noqa: SLF001 - its only name
        return torch.matmul(a, b)

    def forward(operands: Mapping[str, Any]) -> Any:
        a, b = _upright_tensors(case, operands["a"], operands.get("b", operands["a"]))
        if case.scales == "blocks":
            return torch._scaled_mm(  # noqa: SLF001 - its only name
                *(a, b),
                scale_a=operands["row_scale"],
                scale_b=operands["col_scale"],
                out_dtype=torch.bfloat16,
            )
        match case.epilogue:
            case "bias":
                return torch.matmul(a, b) + operands["bias"]
            case "bias_gelu":
                total = torch.matmul(a, b) + operands["bias"]
                return torch.nn.functional.gelu(total, approximate="tanh")
            case "residual":
                return torch.matmul(a, b) + operands["residual"]
            case "swiglu":
                gate = torch.nn.functional.silu(torch.matmul(a, b))
                return gate * torch.matmul(a, _upright_tensors(case, a, operands["up"])[1])
        return multiply(operands, a, b)

    def backward(operands: Mapping[str, Any]) -> tuple[Any, Any]:
        a, b = _upright_tensors(case, operands["a"], operands["b"])
        by_a = multiply(operands, operands["cotangent"], b.mT)
        by_b = multiply(operands, a.mT, operands["cotangent"])
        # As the operands are stored.
        return (
            by_a.mT if case.problem.transpose_a else by_a,
            by_b.mT if case.problem.transpose_b else by_b,
        )

    def run(operands: Mapping[str, Any]) -> Any:
        if case.direction == "forward":
            return (forward(operands),)
        if case.direction == "backward":
            return backward(operands)
        return (forward(operands), *backward(operands))

    return run


def _tensor(x: jax.Array) -> Any:
    """Returns an array as a tensor, of 8-bit floats by way of their bits."""
    torch = _torch()

    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
        return torch.from_dlpack(bits).view(getattr(torch, str(x.dtype)))
    return torch.from_dlpack(x)


def _torch() -> Any:
    """Returns torch, which need not be installed for this module to be imported."""
    return importlib.import_module("torch")


def _upright_tensors(case: Case, a: Any, b: Any) -> tuple[Any, Any]:
    return (
        a.mT if case.problem.transpose_a else a,
        b.mT if case.problem.transpose_b else b,
    )
