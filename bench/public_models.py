"""Compares models that others wrote, stock and accelerated.

    pip install flax dm-haiku equinox einops optax
    git clone https://github.com/jax-ml/bonsai models/bonsai
    git clone https://github.com/google-deepmind/dm-haiku models/dm-haiku
    git clone https://github.com/patrick-kidger/equinox models/equinox
    git clone https://github.com/kvfrans/jax-diffusion-transformer models/dit
    python bench/public_models.py --models=models --compile

Each computes its outputs, a loss and the gradients of all parameters on the
CPU, in small sizes: in bfloat16 as it is, in bfloat16 accelerated, and in
float32. `error` is the largest over outputs and gradients of the accelerated
program's distance from float32 over that of the stock one, root mean squares of
arrays. With --compile, the kernels of the accelerated program are compiled for
an H200, which need not be there. A model that is not there is left out, and the
line says why.
"""

import functools
import importlib
import json
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before JAX is imported.
    importlib.import_module("bench")

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from bench import command
from pallas_gemm import accelerate, explain, offline, target

PROGRAM = "public_models"
GPU = "h200"
HAIKU = "dm-haiku/examples/transformer"
BATCH, LENGTH, WIDTH, WORDS = 2, 256, 256, 512


class Model(NamedTuple):
    """A model of others.

    Attributes:
        params: Its parameters, in float32.
        outputs: The function of parameters and inputs.
        inputs: The inputs.
    """

    params: Any
    outputs: Callable[..., jax.Array]
    inputs: Any


def _tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 1, WORDS)


def qwen3(_: pathlib.Path) -> Model:
    """Qwen3 of jax-ml/bonsai, in Flax nnx."""
    from flax import nnx

    own: Any = importlib.import_module("bonsai.models.qwen3.modeling")
    config = own.ModelConfig(
        num_layers=2,
        vocab_size=WORDS,
        emb_dim=WIDTH,
        mlp_dim=3 * WIDTH,
        num_heads=4,
        head_dim=64,
        num_kv_heads=2,
        rope_theta=1_000_000,
        rope_scaling_factor=8.0,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    graph, params = nnx.split(own.Qwen3(config, rngs=nnx.Rngs(0)))

    def outputs(params: Any, tokens: Any) -> Any:
        cache = own.init_cache(config, BATCH, LENGTH, 0, params["embedder"]["embedding"].dtype)
        model = nnx.merge(graph, params)
        return model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))

    return Model(params, outputs, _tokens())


def gemma3(_: pathlib.Path) -> Model:
    """The text model of Gemma 3 of jax-ml/bonsai, in Flax nnx."""
    from flax import nnx

    own: Any = importlib.import_module("bonsai.models.gemma3.modeling")
    config = own.TextConfig(
        attention_bias=False,
        attention_dropout=0.0,
        head_dim=64,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        layer_types=[own.AttentionMode.SLIDE, own.AttentionMode.FULL],
        max_position_embeddings=LENGTH,
        num_attention_heads=4,
        num_hidden_layers=2,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_full_factor=8.0,
        rope_full_theta=1000000.0,
        rope_slide_factor=1.0,
        rope_slide_theta=10000.0,
        sliding_window=LENGTH // 2,
        vocab_size=WORDS,
        norm_dtype=jnp.float32,
    )
    graph, params = nnx.split(own.Gemma3TextModel(config, rngs=nnx.Rngs(0)))
    embedding = jax.random.normal(jax.random.key(2), (WORDS, WIDTH))

    def outputs(params: Any, tokens: Any) -> Any:
        table = params["embedding"]
        caches = own.init_cache(
            types.SimpleNamespace(text_config=config), BATCH, LENGTH, 0, table.dtype
        )
        ones = jnp.ones_like(tokens)
        zeros = jnp.zeros_like(tokens)
        masks = (
            own.make_window_mask(caches[0], zeros, config.sliding_window, out_sharding=None),
            own.make_causal_mask(caches[0], zeros, out_sharding=None),
        )
        model = nnx.merge(graph, params["model"])
        hidden = model(jnp.take(table, tokens, axis=0), caches, ones, *masks)
        return hidden.astype(table.dtype) @ table.T

    return Model({"model": params, "embedding": embedding}, outputs, _tokens())


def mamba2(_: pathlib.Path) -> Model:
    """Mamba-2 of jax-ml/bonsai, in Flax nnx."""
    from flax import nnx

    own: Any = importlib.import_module("bonsai.models.mamba2.modeling")
    config = own.ModelConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        state_size=64,
        head_dim=64,
        chunk_size=128,
        residual_in_fp32=False,
        num_hidden_layers=2,
    )
    graph, params = nnx.split(own.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)))

    def outputs(params: Any, tokens: Any) -> Any:
        return nnx.merge(graph, params)(tokens)["logits"]

    return Model(params, outputs, _tokens())


def haiku(_: pathlib.Path) -> Model:
    """The language model among dm-haiku's examples."""
    import haiku as hk

    own: Any = importlib.import_module("model")

    @hk.transform
    def run(tokens: Any) -> Any:
        stack = own.Transformer(num_heads=4, num_layers=2, attn_size=64, dropout_rate=0.0)
        return own.LanguageModel(stack, model_size=WIDTH, vocab_size=WORDS, pad_token=0)(tokens)

    key, tokens = jax.random.key(0), _tokens()
    outputs = functools.partial(_with_key, run.apply, key)
    return Model(run.init(key, tokens), outputs, tokens)


def _with_key(apply: Any, key: Any, params: Any, tokens: Any) -> Any:
    return apply(params, key, tokens)


def equinox(models: pathlib.Path) -> Model:
    """BERT of Equinox's documentation."""
    import equinox as eqx

    cells = json.loads((models / "equinox/docs/examples/bert.ipynb").read_text())["cells"]
    own: dict[str, Any] = {"Mapping": Mapping, "eqx": eqx, "jax": jax, "jnp": jnp}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and source.startswith("class "):
            # Its types of arrays are for readers.
            exec(f"from __future__ import annotations\n{source}", own)  # noqa: S102
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 4 * WIDTH,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": LENGTH,
        "type_vocab_size": 2,
    }
    model = own["BertClassifier"](sizes, 64, jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def outputs(params: Any, tokens: Any) -> Any:
        whole = eqx.combine(params, rest)
        inputs = {"token_ids": tokens, "segment_ids": jnp.zeros_like(tokens)}
        return jax.vmap(lambda x: whole(x, enable_dropout=False))(inputs)

    return Model(params, outputs, _tokens())


def dit(_: pathlib.Path) -> Model:
    """A diffusion transformer, in Flax linen."""
    own: Any = importlib.import_module("diffusion_transformer")
    model = own.DiT(
        patch_size=2,
        hidden_size=WIDTH,
        depth=2,
        num_heads=4,
        mlp_ratio=4,
        class_dropout_prob=0.0,
        num_classes=8,
    )
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = (
        jax.random.normal(keys[0], (BATCH, 32, 32, 4)),
        jnp.arange(BATCH),
        jnp.arange(BATCH),
    )
    params = model.init(keys[1], *inputs)
    # It begins with layers of zeros, after which nothing is left to compare.
    leaves, tree = jax.tree.flatten(params)
    drawn = jax.random.split(keys[2], len(leaves))
    leaves = [
        x if jnp.any(x) else 0.02 * jax.random.normal(key, x.shape)
        for x, key in zip(leaves, drawn, strict=True)
    ]

    def outputs(params: Any, inputs: Any) -> Any:
        return model.apply(params, *inputs)

    return Model(jax.tree.unflatten(tree, leaves), outputs, inputs)


MODELS: Mapping[str, Callable[[pathlib.Path], Model]] = {
    "gemma3": gemma3,
    "qwen3": qwen3,
    "mamba2": mamba2,
    "haiku": haiku,
    "equinox": equinox,
    "dit": dit,
}


def step(model: Model) -> Callable[..., Any]:
    """Returns the function of parameters and inputs: outputs and gradients."""

    def loss(params: Any, inputs: Any) -> Any:
        outputs = model.outputs(params, inputs)
        return jnp.mean(jnp.square(outputs.astype(jnp.float32) - 1)), outputs

    def both(params: Any, inputs: Any) -> Any:
        gradients, outputs = jax.grad(loss, has_aux=True)(params, inputs)
        return outputs, gradients

    return both


def cast(tree: Any, dtype: Any) -> Any:
    """Returns a tree whose floating-point arrays have a type."""

    def one(x: Any) -> Any:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def errors(found: Any, exact: Any) -> np.ndarray:
    """Returns the root mean square of what each array is off by."""

    def one(x: Any, y: Any) -> float:
        return float(
            np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - np.asarray(y, np.float64))))
        )

    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return np.array([one(x, y) for x, y in leaves])


def compared(name: str, models: pathlib.Path, *, is_compiled: bool) -> str:
    """Returns a line on a model."""
    try:
        model = MODELS[name](models)
    except (ImportError, OSError) as error:
        return f"{name:8} left out: {error}"
    run = step(model)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(run)(model.params, model.inputs)
    args = cast(model.params, jnp.bfloat16), cast(model.inputs, jnp.bfloat16)
    with target(GPU):
        found = jax.jit(accelerate(run))(*args)
        rewritten = explain(accelerate(run), *args).rewritten or ()
    stock = jax.jit(run)(*args)
    of_ours, of_stock = errors(found, exact), errors(stock, exact)
    worst = float((of_ours / np.maximum(of_stock, 1e-9)).max())
    ours = sum(one.times for one in rewritten if one.why is None)
    folded = sum(one.times for one in rewritten if one.folded)
    line = f"{name:8} error {worst:.2f} x stock's; {ours} of"
    line += f" {sum(one.times for one in rewritten)} products by kernels, {folded} with more"
    if is_compiled and ours:
        with target(GPU):
            reports = offline.compile_reports(jax.jit(accelerate(run)), *args, target=GPU)
        spilled = sum(report.spill_bytes for report in reports)
        line += f"; {len(reports)} kernels compiled, {spilled} bytes spilled"
    return line


def define_flags(values: flags.FlagValues) -> None:
    """Defines what the command line takes."""
    flags.DEFINE_string("models", "models", "the folder of the repositories", flag_values=values)
    flags.DEFINE_multi_enum(
        "model", [*MODELS], [*MODELS], "which one; may be repeated", flag_values=values
    )
    flags.DEFINE_bool("compile", False, "compile the kernels for an H200", flag_values=values)


def run(values: flags.FlagValues) -> int:
    """Prints a line on each model."""
    models = pathlib.Path(values.models)
    sys.path += [str(models / name) for name in ("bonsai", "dit", HAIKU)]
    for name in values.model:
        print(compared(name, models, is_compiled=values.compile), flush=True)
    return 0


if __name__ == "__main__":
    command.start(PROGRAM, run, define_flags)
