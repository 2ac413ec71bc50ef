"""Training steps of the examples' models, with any layers, on one device or a mesh."""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

from examples import transformer_linen, transformer_nnx
from examples.sequences import Task
from examples.settings import Attention, Settings

APIS: dict[str, ModuleType] = {"linen": transformer_linen, "nnx": transformer_nnx}
# Layers whose kernels are split by columns over the axis "model", and those that are split by rows:
# between the two, nothing has to be communicated.
BY_COLUMNS = frozenset(("query", "key", "value", "gate", "up"))
BY_ROWS = frozenset(("out", "down"))


@dataclasses.dataclass
class Trainee:
    """A transformer in training.

    Attributes:
        name: Its name in tables.
        step: The compiled training step.
        state: Parameters and the optimiser's state.
        losses: The loss before each step.
    """

    name: str
    step: jax.stages.Compiled
    state: Any
    losses: list[Any] = dataclasses.field(default_factory=list)

    def train(self, tokens: jax.Array) -> None:
        """Makes a step; returns while the device still works on it."""
        self.state, loss = self.step(self.state, tokens)
        self.losses.append(loss)

    def wait(self) -> None:
        """Waits until all steps are done."""
        jax.block_until_ready(self.losses[-1])

    @property
    def memory(self) -> int:
        """Bytes that a step takes on a device: its state, its batch, and what lies in between."""
        found: Any = self.step.memory_analysis()
        given = found.argument_size_in_bytes + found.output_size_in_bytes
        return given - found.alias_size_in_bytes + found.temp_size_in_bytes

    @property
    def has_kernels(self) -> bool:
        """Whether a kernel of ours computes any of a step's products."""
        return "mosaic_gpu" in (self.step.as_text() or "")

    @property
    def curve(self) -> np.ndarray:
        """The losses as numbers."""
        return np.array([float(loss) for loss in self.losses])


@dataclasses.dataclass(frozen=True)
class Training(abc.ABC):
    """The settings that all trainees of a comparison share.

    Attributes:
        settings: The sizes.
        mesh: Where parameters and examples lie; None for one device.
    """

    settings: Any
    mesh: Mesh | None = dataclasses.field(default=None, kw_only=True)

    @abc.abstractmethod
    def params(self) -> Any:
        """Returns the parameters; they are those of all kinds of layers."""

    @abc.abstractmethod
    def loss(self, layers: str, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns what a model with layers of a kind makes of a batch."""

    @abc.abstractmethod
    def placement(self, names: Sequence[str]) -> jax.P:
        """Returns how a parameter is split, by the names on its path."""

    def trainee(self, name: str, layers: str) -> Trainee:
        """Makes the parameters, the same for all trainees, and compiles a step."""
        state = self._initial()
        step = jax.jit(functools.partial(self._step, layers), donate_argnums=0)
        # Where it lies is a part of what is compiled.
        result = step.lower(state, self.batch(0)).compile()
        return Trainee(name, result, state)

    def batch(self, step: int) -> jax.Array:
        """Returns the examples of a step where they are needed."""
        settings = self.settings
        tokens = Task(settings.vocabulary).batch(step, settings.batch, settings.sequence)
        if self.mesh is None:
            return jnp.asarray(tokens)
        axes = [name for name in self.mesh.axis_names if name != "model"]
        return jax.device_put(tokens, NamedSharding(self.mesh, jax.P(*axes)))

    @functools.cached_property
    def _initial(self) -> jax.stages.Compiled:
        """The function that makes parameters and the optimiser's state where they belong."""
        placed = jax.tree.map_with_path(self._sharding, jax.eval_shape(self._init))
        return jax.jit(self._init, out_shardings=placed).lower().compile()

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(self.settings.learning_rate)

    def _init(self) -> Any:
        params = self.params()
        return params, self._optimizer.init(params)

    def _step(self, layers: str, state: Any, tokens: jax.Array) -> Any:
        params, moments = state
        loss, gradients = jax.value_and_grad(functools.partial(self.loss, layers))(params, tokens)
        updates, moments = self._optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def _sharding(self, path: Any, _: Any) -> NamedSharding | None:
        if self.mesh is None:
            return None
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return NamedSharding(self.mesh, self.placement(names))


@dataclasses.dataclass(frozen=True)
class Trainer(Training):
    """Trains transformers.

    Attributes:
        settings: The sizes.
        api: "linen" or "nnx".
        attention: Implementation of `jax.nn.dot_product_attention`.
        fused_loss: Layers that are not stock have `linear_cross_entropy` in the place of logits.
        mesh: The mesh, with the axes "data" and "model", either or both; None for one device.
    """

    settings: Settings
    api: str
    attention: Attention
    fused_loss: bool = False

    def params(self) -> Any:
        """Returns the parameters of any kind of layers."""
        return APIS[self.api].init(self.settings, jax.random.key(0))

    def loss(self, layers: str, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the mean over tokens of how unlikely the model thought each."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        apply = functools.partial(APIS[self.api].apply, self.settings, layers, self.attention)
        if self.fused_loss and layers != "stock":
            return apply(params, inputs, labels)
        return mean_loss(apply(params, inputs), labels)

    def placement(self, names: Sequence[str]) -> jax.P:
        """Returns how a parameter is split over the axis "model"."""
        layer = names[names.index("kernel") - 1] if "kernel" in names else ""
        if self.mesh is None or "model" not in self.mesh.axis_names:
            return jax.P()
        if layer in BY_COLUMNS:
            return jax.P(None, "model")
        return jax.P("model", None) if layer in BY_ROWS else jax.P()


def mean_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the mean over tokens of how unlikely logits make each, in float32 at least."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(wide, tokens).mean()


def mesh_of(text: str) -> Mesh | None:
    """Returns the mesh that a text such as "data:2,model:4" describes; None of an empty one.

    Raises:
        ValueError: It describes none, or there are too few devices.
    """
    if not text:
        return None
    try:
        sizes = {name: int(size) for name, size in (part.split(":") for part in text.split(","))}
    except ValueError:
        sizes = {}
    is_known = sizes and set(sizes) <= {"data", "model"} and min(sizes.values()) >= 1
    if not is_known or len(sizes) < len(text.split(",")):
        raise ValueError(f"mesh={text!r} must be like data:2, model:4 or data:2,model:4")
    devices = jax.devices()
    wanted = int(np.prod(list(sizes.values())))
    if wanted > len(devices):
        raise ValueError(f"mesh={text!r} needs {wanted} devices, there are {len(devices)}")
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:wanted],
    )
