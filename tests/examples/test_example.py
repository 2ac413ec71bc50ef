"""The example that trains: it learns, the same with and without the multiply, also on a mesh."""

import dataclasses
import functools
import io
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from rich.console import Console

import pallas_gemm
from examples import contest, train_transformer
from examples.sequences import Task
from examples.settings import PRESETS, Settings
from examples.training import Trainer, mesh_of
from pallas_gemm import explain
from tests import forks, reference

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _types_as_users_have_them() -> Iterator[None]:
    """Flax's norms and JAX's attention mix types, which the other tests do not allow."""
    with jax.numpy_dtype_promotion("standard"):
        yield


SMALLEST = ("--blocks=1", "--sequence=16", "--rounds=2", "--steps=2")


def _options(*arguments: str) -> flags.FlagValues:
    """Returns what a command line asks for, on the smallest model."""
    options = flags.FlagValues()
    train_transformer.define_flags(options)
    options(["train_transformer", *SMALLEST, *arguments])
    return options


def _run(*arguments: str) -> tuple[dict[str, Any], str]:
    """Runs the program and returns what it found and what it printed."""
    options = _options(*arguments)
    console = Console(record=True, width=120, file=io.StringIO())
    found = train_transformer.run(train_transformer.trainer_of(options), options, console)
    return found, console.export_text()


def test_our_layers_train_as_stock_layers_do(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "found.json"
    found, text = _run("--api=linen", "--layers=fused", f"--json={file}")
    stock, ours = found["stock"]["losses"], found["pallas_gemm"]["losses"]
    assert len(stock) == 2 * 2 * 2
    assert stock[-1] < stock[0]
    # Two programs: even where XLA computes all products of both, it may round differently.
    trainer = train_transformer.trainer_of(_options("--api=linen"))
    exact = _exact_curve(trainer, len(stock))
    ours, stock = np.asarray(ours, np.float32), np.asarray(stock, np.float32)
    reference.assert_as_good_as_xla(ours, stock, exact)
    assert json.loads(file.read_text()) == found
    assert f"{ours[0]:.4f}" in text
    # No speed is claimed where no kernel of ours ran.
    assert "XLA computes all products here" in text
    assert "in time per step" not in text
    for name in ("stock", "pallas_gemm"):
        for what in ("ms_per_step", "host_ms", "memory_bytes"):
            assert found[name][what] > 0


def _exact_curve(trainer: Trainer, steps: int) -> np.ndarray:
    """Returns the losses of stock layers in float64 from the same parameters, on one device."""
    return _exact_losses(trainer.settings, trainer.api, trainer.attention)[:steps]


@functools.cache
def _exact_losses(settings: Settings, *others: Any) -> np.ndarray:
    state = jax.device_get(Trainer(settings, *others)._initial())
    with jax.enable_x64(True):
        wide = Trainer(dataclasses.replace(settings, dtype="float64"), *others)
        step = jax.jit(functools.partial(wide._step, "stock"))
        state = jax.tree.map(lambda x: x.astype("float64") if x.dtype == "float32" else x, state)
        losses = []
        for i in range(8):
            state, loss = step(state, wide.batch(i))
            losses.append(float(loss))
    return np.array(losses)


# Both compute the same with other layers, for which there are tests of their own.
APIS = ("linen", pytest.param("nnx", marks=pytest.mark.stress))


@pytest.mark.parametrize("api", APIS)
def test_a_loss_without_logits_trains_as_stock_does(api: str) -> None:
    trainer = train_transformer.trainer_of(_options(f"--api={api}", "--loss=fused"))
    curves = []
    for layers in ("fused", "stock"):
        trainee = trainer.trainee(layers, layers)
        for step in range(4):
            trainee.train(trainer.batch(step))
        curves.append(jnp.asarray(trainee.curve, jnp.float32))
    reference.assert_as_good_as_xla(curves[0], curves[1], _exact_curve(trainer, 4))
    params, tokens = jax.eval_shape(trainer.params), trainer.batch(0)
    asked = explain(jax.grad(functools.partial(trainer.loss, "fused")), params, tokens)
    assert len(asked.last_layers) == 1


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def test_on_a_mesh_as_little_is_communicated_and_as_much_is_learnt() -> None:
    trainer = train_transformer.trainer_of(_options("--api=nnx", "--mesh=data:2,model:2"))
    curves, communicated = [], []
    for layers in ("hooks", "stock"):
        trainee = trainer.trainee(layers, layers)
        for step in range(4):
            trainee.train(trainer.batch(step))
        curves.append(jnp.asarray(trainee.curve, jnp.float32))
        text = trainee.step.as_text() or ""
        communicated.append({name: text.count(f" {name}(") for name in COLLECTIVES})
    assert communicated[0] == communicated[1]
    # Of the products between two blocks one is summed over the axis "model", both ways.
    assert communicated[0]["all-reduce"] > 0
    assert communicated[0]["all-gather"] == 0
    reference.assert_as_good_as_xla(curves[0], curves[1], _exact_curve(trainer, 4))


@pytest.mark.parametrize("op", ["stock", "pallas_gemm"])
def test_one_alone_has_nothing_to_be_compared_with(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def instead(self: Trainer, name: str, layers: str) -> Any:
        return _Fake(name)

    monkeypatch.setattr(Trainer, "trainee", instead)
    found, text = _run(f"--op={op}")
    assert list(found) == [op]
    assert "differ" not in text


class _Fake:
    """Somebody who trains at once, and notes who else did."""

    memory = 1
    has_kernels = True
    curve = np.zeros(4)
    order: list[str]

    def __init__(self, name: str, order: list[str] | None = None) -> None:
        self.name = name
        self.order = [] if order is None else order

    def train(self, _: Any) -> None:
        self.order.append(self.name)

    def wait(self) -> None:
        pass


def test_trainees_take_turns_and_nobody_is_always_first() -> None:
    order: list[str] = []
    pair: Any = [_Fake("a", order), _Fake("b", order)]
    seen = []
    times = contest.hold(pair, lambda step: seen.append(step) or jnp.zeros(()), 2, 2, lambda: None)
    assert order == 2 * ["a", "a", "b", "b", "b", "b", "a", "a"]
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [(len(own.steps), len(own.hosts)) for own in times] == [(2, 8)] * 2


def test_the_first_round_and_outliers_do_not_count() -> None:
    ours, stock = contest.Times([9.0, 1.0, 1.0, 5.0]), contest.Times([1.0, 2.0, 2.0, 2.0])
    assert (ours.step, stock.step) == (1.0, 2.0)
    assert contest.ratio(ours, stock) == 2.0
    assert contest.Times([3.0]).step == 3.0


def test_the_sequences_follow_the_rule_as_often_as_they_should() -> None:
    task = Task(vocabulary=8, noise=0.2)
    tokens = task.batch(3, 64, 200)
    assert tokens.shape == (64, 201)
    np.testing.assert_array_equal(tokens, task.batch(3, 64, 200))
    assert not np.array_equal(tokens, task.batch(4, 64, 200))
    counts = np.zeros((8, 8))
    np.add.at(counts, (tokens[:, :-1].ravel(), tokens[:, 1:].ravel()), 1)
    rates = counts / counts.sum(1, keepdims=True)
    # 0.8 by the rule, and an eighth of the rest by chance: 1600 draws of each are 4 sigma of 0.01.
    np.testing.assert_array_less(np.abs(rates.max(1) - 0.825), 0.04)
    entropy = -(rates * np.log(rates)).sum(1).mean()
    assert abs(entropy - task.best_loss) < 0.05


def test_the_large_preset_has_a_billion_parameters() -> None:
    settings = PRESETS["1b"]
    assert (settings.width, settings.hidden, settings.sequence) == (4096, 14336, 4096)
    params, _ = jax.eval_shape(Trainer(settings, "linen", "xla")._init)
    count = sum(x.size for x in jax.tree.leaves(params))
    assert round(count / 1e9, 1) == 1.0
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    # All but embeddings and norms are multiplied with, twice the size of which is backward.
    assert 0.98 < settings.product_flops / (6 * count * 4096 * settings.batch) < 1


def _planned(settings: Settings, layers: str) -> Any:
    """Returns what computes a training step on an H200."""
    trainer = Trainer(settings, "linen", "xla")
    state = jax.eval_shape(trainer._init)
    tokens = jax.ShapeDtypeStruct((settings.batch, settings.sequence + 1), jnp.int32)
    with pallas_gemm.target("h200"):
        return explain(functools.partial(trainer._step, layers), state, tokens)


@pytest.mark.parametrize("layers", ["fused", "hooks"])
def test_all_products_of_a_large_step_run_on_the_kernel_without_copies(layers: str) -> None:
    explained = _planned(dataclasses.replace(PRESETS["1b"], blocks=1), layers)
    decisions = explained.products
    # 7 products of a block and the logits, each with two gradients; our layers add up those of what
    # query, key and value have in common, and those of what gate and up have, in one product. Gate
    # and up themselves are one.
    assert len(decisions) == 3 * 8 - (2 + 1 + 1 if layers == "fused" else 0)
    assert {decision.implementation for decision in decisions} == {"hopper"}
    assert [step for decision in decisions for step in decision.plan.realigned.steps] == []
    assert explained.copies == ()


def test_stock_layers_hooks_and_ours_are_told_apart_as_they_were_measured() -> None:
    # 46.56, 45.43 and 45.21 ms: docs/layers.md.
    stock, hooks, ours = (
        _planned(PRESETS["1b"], layers).seconds for layers in ("stock", "hooks", "fused")
    )
    assert stock > hooks > ours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:2,pipe:2", "must be like"),
        ("data", "must be like"),
        ("data:0", "must be like"),
        ("data:2,data:2", "must be like"),
        ("model:9", "needs 9 devices, there are 8"),
    ],
)
def test_a_mesh_that_cannot_be_made_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"mesh='{text}'.*{message}"):
        mesh_of(text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--mesh=data:3", r"--mesh splits batch=\d+, which data:3 cannot"),
        ("--mesh=model:3", r"--mesh splits width=\d+, which model:3 cannot"),
        ("--attention=cudnn", "--attention=cudnn needs a GPU; auto takes"),
        (
            "--json=/no/such/folder/x.json",
            "cannot write /no/such/folder/x.json: there is no folder",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_is_begun(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_transformer.trainer_of(_options(option))


def test_the_program_starts_as_a_script_and_says_what_is_wrong(tmp_path: pathlib.Path) -> None:
    program = ROOT / "examples" / "train_transformer.py"
    done = forks.of_session().run_program(program, "--mesh=rows:2", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("train_transformer: mesh='rows:2' must be like")
    assert done.stderr.count("\n") == 1


@pytest.mark.stress
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_blocks_of_8_bits_learn_as_bfloat16_does(api: str) -> None:
    """Two blocks along each dimension of a layer; losses are alike in the mean once they settle."""
    settings = Settings(1, 256, 4, 256, 32, 16, 16, "bfloat16", 1e-3)
    trainer, curves = Trainer(settings, api, "xla"), []
    for kind in ("stock", "fp8_blocks"):
        trainee = trainer.trainee(kind, kind)
        for step in range(40):
            trainee.train(trainer.batch(step))
        curves.append(trainee.curve)
    stock, ours = curves
    assert stock[-20:].mean() < 0.25 * stock[0]
    assert not np.array_equal(stock, ours)
    # The same examples: what is left is how products are rounded.
    assert abs(ours[-20:].mean() / stock[-20:].mean() - 1) < 0.01
