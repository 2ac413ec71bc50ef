"""The gradients of a last layer as one primitive, which a mesh shares out as a whole.

`loss_chunks` computes them. Derivatives of gradients, and `vmap`, are those of what it computes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from pallas_gemm.op import linear, lowering
from pallas_gemm.op.loss import loss_chunks, loss_partition, loss_windows
from pallas_gemm.op.loss.loss_chunks import Slices
from pallas_gemm.op.loss.loss_layer import Given, Layer, Slopes, Wanted
from pallas_gemm.op.loss.loss_windows import Windows
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.mesh.resharding import Axes
from pallas_gemm.op.product import equally_varying, give_rules, lower_by

gradients_p = core.Primitive("pallas_gemm_loss_gradients")
gradients_p.multiple_results = True
of_device_p = core.Primitive("pallas_gemm_loss_gradients_of_device")
"""The gradients that one device computes."""
of_device_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of a last layer, as far as wanted.

    Attributes:
        layer: The layer.
        wanted: The operands whose gradients are wanted.
        kept: The forward pass has kept the product.
        waits: Logits wait in the array that is to be the gradient of the weight: the last operand.
    """

    layer: Layer
    wanted: Wanted
    kept: bool
    waits: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """The dimensions of each operand: of the layer, of slopes, and of what was kept."""
        own = loss_partition.dimensions_of(self.layer)
        return (*own, *("t",) * (3 + self.layer.total), *("tw",) * self.kept)

    @property
    def results(self) -> tuple[str, ...]:
        """The dimensions of each result."""
        every = ("tk", loss_partition.dimensions_of(self.layer)[1], "w")
        return tuple(x for x, is_wanted in zip(every, self.wanted, strict=True) if is_wanted)

    def run(self, *operands: jax.Array) -> list[jax.Array]:
        """Computes them from operands of one device, none of logits that wait."""
        return self._run(self.layer, None, operands)

    def from_all(self, *operands: jax.Array) -> list[jax.Array]:
        """Computes the same, from logits that wait where there are any."""
        return self._run(self.layer, self._slices(self.layer, operands), operands)

    def _slices(self, layer: Layer, operands: Sequence[Any]) -> Slices | None:
        """Returns how the chunks of kernels are computed from slices, where logits wait."""
        if not self.waits:
            return None
        return Slices(layer, layer.waiting(*operands[:2]))

    def on_one_device(self, *operands: jax.Array) -> list[jax.Array]:
        """Computes the same, by parts of whole arrays where a kernel takes them."""
        return of_device_p.bind(*operands, work=self)

    def by_parts(self, *operands: jax.Array) -> list[jax.Array]:
        """Computes the same in a program for a GPU."""
        layer = dataclasses.replace(self.layer, call=lowering.planned(self.layer.call, gpu=True))
        given, slopes, kept = self._taken_apart(operands)
        own = given.hidden, given.weight
        parts = layer.waiting(*own) if self.waits else layer.chunks(*own)
        if kept is not None or not parts.in_place:
            return self._run(layer, None, operands)
        found = loss_windows.planned(layer, parts, self.wanted, given, slopes)
        if isinstance(found, str):
            found = self._slices(layer, operands) or Slices(layer, layer.slices(*own))
        return self._run(layer, found, operands)

    def _run(
        self, layer: Layer, by: Slices | Windows | None, operands: Sequence[jax.Array]
    ) -> list[jax.Array]:
        given, slopes, kept = self._taken_apart(operands)
        waiting = operands[-1] if by is not None and by.parts.waits else None
        found = loss_chunks.gradients(layer, self.wanted, given, slopes, kept, by, waiting)
        return [x for x in found if x is not None]

    def _taken_apart(self, operands: Sequence[Any]) -> tuple[Given, Slopes, Any]:
        count = 3 + self.layer.bias
        given, rest = Given.of(operands[:count]), operands[count:]
        log_sum_exp, of_log_sum_exp, of_label, *others = rest
        totals = tuple(others[: self.layer.total])
        slopes = Slopes(log_sum_exp, of_log_sum_exp, of_label, totals)
        return given, slopes, rest[-1] if self.kept else None

    def combine(self, results: Sequence[jax.Array], axes: dict[str, Axes]) -> list[jax.Array]:
        """Adds up what devices have: over words for the tokens, over tokens for the others."""
        summed = [axes["w" if own == "tk" else "t"] for own in self.results]
        pairs = zip(results, summed, strict=True)
        return [lax.psum(x, own) if own else x for x, own in pairs]


def gradients(
    layer: Layer,
    wanted: Wanted,
    given: Given,
    slopes: Slopes,
    kept: jax.Array | None,
    *,
    waits: bool = False,
) -> list[jax.Array | None]:
    """Computes what `loss_chunks.gradients` does, as one primitive.

    Args:
        layer: The layer.
        wanted: The operands whose gradients are wanted.
        given: Its operands.
        slopes: How the loss changes with its statistics.
        kept: The product, if the forward pass kept it, or the array in which logits wait.
        waits: It is the latter. It says nothing that the operands do not, and where no kernel reads
            it, nothing does.
    """
    work = Gradients(layer, wanted, kept is not None and not waits, waits)
    own = (given.hidden, given.weight, given.labels, *given.bias, *slopes.leaves())
    operands = equally_varying((*own, *(() if kept is None else (kept,))))
    devices = mesh_context.device_request(layer.call, operands)
    avals = tuple(map(jax.typeof, operands))
    jaxpr = _traced(work, avals, jax.sharding.get_abstract_mesh())
    found = iter(gradients_p.bind(*operands, work=work, jaxpr=jaxpr, devices=devices))
    return [next(found) if is_wanted else None for is_wanted in wanted]


@functools.lru_cache(maxsize=1024)
def _traced(work: Gradients, avals: tuple[Any, ...], context: Any) -> core.ClosedJaxpr:
    del context  # What is traced depends on it.
    return jax.make_jaxpr(work.from_all)(*avals)


@gradients_p.def_abstract_eval
def _abstract(*_: Any, jaxpr: core.ClosedJaxpr, **__: Any) -> Any:
    return jaxpr.out_avals


@of_device_p.def_abstract_eval
def _abstract_of_device(*avals: Any, work: Gradients) -> Any:
    return jax.make_jaxpr(work.run)(*avals).out_avals


def _lowered_of_device(
    ctx: mlir.LoweringRuleContext, *operands: Any, work: Gradients, gpu: bool
) -> Any:
    run = work.by_parts if gpu else work.run
    return mesh_context.lower_off_mesh(ctx, run, operands)


def _lowered(
    ctx: mlir.LoweringRuleContext, *operands: Any, work: Gradients, devices: Any, **_: Any
) -> Any:
    if mesh_context.is_one_devices(ctx.module_context.axis_context):
        return mesh_context.lower_off_mesh(ctx, work.on_one_device, operands)
    if work.waits:
        work, operands = dataclasses.replace(work, waits=False), operands[:-1]
        ctx = ctx.replace(avals_in=ctx.avals_in[:-1])
    run = work.run
    if devices is not None and not mesh_context.why_not_partitioned(ctx.module_context):
        run = functools.partial(loss_partition.shared, work)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _jvp(primals: Any, tangents: Any, *, work: Gradients, jaxpr: Any, devices: Any) -> Any:
    changes = linear.derived(work.run, primals, linear.changes(tangents))[1]
    return gradients_p.bind(*primals, work=work, jaxpr=jaxpr, devices=devices), changes


def _batch(operands: Any, dims: Any, *, work: Gradients, **_: Any) -> Any:
    results = jax.vmap(work.run, tuple(dims))(*operands)
    return results, [0] * len(results)


give_rules(gradients_p, jvp=_jvp, batch=_batch)
mlir.register_lowering(gradients_p, _lowered)
lower_by(of_device_p, _lowered_of_device)
