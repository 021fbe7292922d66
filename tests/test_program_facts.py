"""What is learnt of live objects: models, graphs, calls."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diagnose.hooks import _graph, autograd_graph
from diagnose.hooks._graph import walk
from diagnose.hooks._graph_facts import summarize
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.autograd_graph import AutogradGraphHook
from diagnose.hooks.backward import BackwardHook
from diagnose.hooks.model_facts import describe as describe_model
from diagnose.hooks.torch_settings import settings_now
from tests.fakes import tell_of_pass
from tests.running import run, write
from tests.test_model_calls import told


def graph(loss: torch.Tensor, *, recomputing: bool = False, wanted: set[int] = frozenset()) -> dict:  # type: ignore[assignment, type-arg]
    return summarize(*walk(loss.grad_fn, recomputing), wanted)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a walk come to its end on a busy machine, too."""
    monkeypatch.setattr(_graph, "MAX_TIME_NS", 10**11)
    monkeypatch.setattr(autograd_graph, "MAX_TIME_NS", 10**11)


# -- models


def test_a_convolution_with_a_bias_before_a_batch_norm_is_named():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)
    )
    facts = describe_model(model)
    assert facts["biased_before_norm"] == ["0"]
    assert facts["channels_last"] is False
    assert facts["dtypes"] == {"float32": facts["param_bytes"]}
    assert describe_model(model.to(memory_format=torch.channels_last))["channels_last"] is True


@pytest.mark.parametrize(
    ("module", "loops"), [(nn.GRU, True), (nn.RNN, True), (nn.LSTM, False), (nn.GRUCell, False)]
)
def test_what_torch_computes_step_by_step_is_told_from_one_operation_and_from_cells(module, loops):
    assert describe_model(nn.Sequential(module(4, 4)))["loops_in_torch"] is loops
    assert not describe_model(nn.ModuleList([module(4, 4), nn.GRUCell(4, 4)]))["loops_in_torch"]


def test_products_that_autocast_computes_inside_of_a_model_are_told_by_their_numbers():
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    assert graph(layer(x).sum())["product_bytes"] == 4
    with torch.autocast("cpu", torch.bfloat16):
        assert graph(layer(x).float().sum())["product_bytes"] == 2
    assert graph(x.requires_grad_().relu().sum())["product_bytes"] is None


def test_of_an_optimizer_that_holds_copies_nothing_is_told_to_be_unused():
    layer = nn.Linear(8, 8)
    master = [parameter.detach().clone() for parameter in layer.parameters()]
    loss = layer(torch.randn(2, 8)).sum()
    facts = graph(loss, wanted={id(parameter) for parameter in master})
    assert (facts["num_unwanted_tensors"], facts["num_unreached_tensors"]) == (0, 0)
    assert facts["unwanted"]["num_ops"] == 0
    facts = graph(loss, wanted={id(layer.weight)})
    assert facts["num_unwanted_tensors"] == 1, "the bias"
    head = torch.zeros(8, 2, requires_grad=True)
    facts = graph((layer(torch.randn(2, 8)) @ head).sum(), wanted={id(head)})
    assert facts["num_unwanted_tensors"] == 2, "below a head that is a plain tensor"


def test_a_matrix_product_knows_its_multiplications():
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    assert graph((x @ w).sum())["total"]["flops"] == 2 * 8 * 16 * 32
    a, b = torch.randn(5, 8, 16, requires_grad=True), torch.randn(5, 16, 4, requires_grad=True)
    assert graph(torch.bmm(a, b).sum())["total"]["flops"] == pytest.approx(2 * 5 * 8 * 16 * 4)


@pytest.mark.parametrize("inputs_want_gradients", [True, False])
def test_checkpointed_operations_are_told_and_none_is_unpacked(inputs_want_gradients: bool):
    layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    calls = 0

    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return layer(x)

    x = torch.randn(4, 8, requires_grad=inputs_want_gradients)
    loss = checkpoint(counted, x, use_reentrant=False).sum()
    facts = graph(loss, recomputing=True)
    assert facts["recomputed_share"] > 0.9
    assert facts["num_recomputed"] == 2, "the product and the ReLU"
    assert calls == 1, "looking at the graph computes nothing again"
    assert graph(layer(x).sum(), recomputing=True)["recomputed_share"] == 0


def test_gradients_that_no_optimizer_uses_are_told_from_those_on_the_way_to_one():
    first, second, third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    loss = third(second(first(torch.randn(2, 4)))).sum()
    head = {id(p) for p in third.parameters()}
    facts = graph(loss, wanted=head)
    assert facts["num_unwanted_tensors"] == 4
    assert facts["unwanted"]["num_ops"] == 2, "the head's own product leads to its weights"
    inner = graph(loss, wanted={id(p) for p in first.parameters()})
    assert inner["unwanted"]["num_ops"] == 0, "the way to the first layer leads through the others"


def test_nodes_that_no_backward_pass_uses_are_counted():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    shares = {}
    for extra in (False, True):
        recorder = Recorder()
        with AutogradGraphHook().install(recorder):
            for _ in range(14):
                loss = model(torch.randn(2, 4)).sum()
                if extra:
                    model(torch.randn(2, 4)).sum()
                tell_of_pass(recorder, loss)
                loss.backward()
            shares[extra] = recorder.facts["graph"]["wasted_share"]
        assert not recorder.looks.on_backward
    assert shares[False] == 0
    assert 0.3 < shares[True] <= 0.5


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_inside_of_reentrant_checkpoints_is_added_up_while_they_are_computed_again(nested: bool):
    def region(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x))

    def outer(x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(region, x, use_reentrant=True) if nested else region(x)
        return again

    recorder = Recorder()
    weight = nn.Parameter(torch.ones(8, 4))
    with AutogradGraphHook().install(recorder), BackwardHook().install(recorder):
        for _ in range(12):
            inside = checkpoint(outer, weight * 2, use_reentrant=True)
            checkpoint(outer, inside, use_reentrant=True).sum().backward()
        facts = recorder.facts["graph"]
        assert facts["num_checkpoints"] == 2
        # Two regions of two results, of 32 float32 each; an inner region is a node of an outer one as well.
        assert facts["inside_bytes"] == 2 * (3 if nested else 2) * 128
        assert not recorder.looks.on_inner_backward


class Again(torch.autograd.Function):
    """Keeps its input alone, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(torch.tanh(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(torch.tanh(torch.tanh(x)), grad)
        assert x.grad is not None
        return x.grad


class Implicit(torch.autograd.Function):
    """Keeps the graph of its last step, and goes through that in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.given = x.detach().requires_grad_()
            ctx.result = torch.tanh(ctx.given)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (given,) = torch.autograd.grad(ctx.result, ctx.given, grad)
        return given


@pytest.mark.parametrize(("function", "regions"), [(Again, 2), (Implicit, 0)])
def test_a_function_that_computes_its_forward_again_is_a_checkpoint(function: Any, regions: int):
    recorder = Recorder()
    weight = nn.Parameter(torch.ones(8, 4))
    with AutogradGraphHook().install(recorder), BackwardHook().install(recorder):
        for _ in range(16):
            function.apply(function.apply(weight * 2)).sum().backward()
        facts = recorder.facts["graph"]
    assert facts["num_checkpoints"] == facts["regions"]["num_ops"] == regions
    if regions:
        assert facts["inside_bytes"] == regions * 2 * 128
        assert 0 < facts["regions"]["forward_ns"] < facts["total"]["forward_ns"]
        assert facts["regions"]["backward_ns"] == pytest.approx(3 * facts["regions"]["forward_ns"])


@pytest.mark.parametrize(
    ("around_forward", "around_backward"), [(False, False), (False, True), (True, True)]
)
def test_anomaly_detection_is_told_by_what_it_is_around(around_forward: bool, around_backward: bool):
    recorder = Recorder()
    weight = nn.Parameter(torch.ones(8, 4))
    with AutogradGraphHook().install(recorder), BackwardHook().install(recorder):
        for _ in range(12):
            with torch.autograd.set_detect_anomaly(around_forward):
                loss = (weight * 2).sum()
            with torch.autograd.set_detect_anomaly(around_backward):
                loss.backward()
    facts = recorder.facts["graph"]
    assert (facts["keeps_stacks"], facts["searches_nan"]) == (around_forward, around_backward)


def test_a_slow_operation_in_float64_counts_however_few_numbers_it_gives():
    x = torch.randn(64, 8, 8, dtype=torch.float64, requires_grad=True)
    nodes, truncated = walk(torch.linalg.cholesky(x @ x.mT + 9 * torch.eye(8)).sum().grad_fn)
    assert summarize(nodes, truncated, ())["double"]["num_ops"] == 0
    next(node for node in nodes if "Cholesky" in node.name).backward_ns = 2_000_000
    assert summarize(nodes, truncated, ())["double"]["num_ops"] == 1


# -- calls


@pytest.mark.parametrize("again", ["never", "no_grad", "eval"])
def test_a_second_call_with_the_tensor_that_was_trained_on_is_counted(again: str):
    model = nn.Linear(4, 4)

    def step(_: int) -> None:
        x = torch.randn(2, 4)
        model(x)
        if again != "never":
            model.train(again != "eval")
            with torch.no_grad():
                model(x)
            model.train()

    facts = told([model], step)
    assert (facts["repeated"], facts["judged"]) == (float(again == "no_grad"), float(again == "eval"))
    assert facts["batch_size"] == 2


def test_a_call_with_the_adapters_off_is_no_second_call_of_the_same_model():
    class Adapted(nn.Linear):
        disable_adapters = False

    model = Adapted(4, 4)

    def step(_: int) -> None:
        x = torch.randn(2, 4)
        model.disable_adapters = False
        model(x)
        model.disable_adapters = True
        with torch.no_grad():
            model(x)

    assert told([model], step)["repeated"] == 0.0


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_the_type_that_autocast_computes_in_is_that_of_the_training_calls(dtype: str):
    model = nn.Linear(4, 4)

    def step(_: int) -> None:
        with torch.autocast("cpu", enabled=bool(dtype)):
            model(torch.randn(2, 4))
        with torch.no_grad():
            model(torch.randn(2, 4))

    assert told([model], step)["autocast_dtype"] == dtype


@pytest.mark.parametrize("evaluated", ["a teacher", "the trained model", "a part of it"])
def test_a_teacher_is_told_from_an_evaluation_of_the_trained_model(evaluated: str):
    model, teacher = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    called = {"a teacher": teacher, "the trained model": model, "a part of it": model[0]}[evaluated]

    def step(_: int) -> None:
        model(torch.randn(2, 4))
        with torch.no_grad():
            called(torch.randn(2, 4))

    assert told([model], step)["untrained"] == (1.0 if evaluated == "a teacher" else 0.0)


@pytest.mark.parametrize(
    ("mode", "again", "free"), [("train", False, 1.0), ("train", True, 0.0), ("eval", False, 0.0)]
)
def test_a_call_without_gradients_in_training_mode_on_something_else_is_none_that_judges(
    mode: str, again: bool, free: float
):
    model = nn.Sequential(nn.Linear(4, 4))

    def step(_: int) -> None:
        batch = torch.randn(2, 4)
        model(batch)
        with torch.no_grad():
            getattr(model, mode)()(batch if again else torch.randn(2, 4))
        model.train()

    assert told([model], step)["free"] == free


@pytest.mark.extended
def test_a_function_that_dynamo_gives_up_on_for_a_break_in_a_loop_is_told_with_its_line(tmp_path: Path):
    script = write(
        tmp_path / "compiles.py",
        "import torch\n"
        "from diagnose.hooks.compiler_counters import describe\n"
        "def double(x):\n"
        "    for _ in range(3):\n"
        "        x = x * 2\n"
        "        torch._dynamo.graph_break()\n"
        "    return x\n"
        "def triple(x):\n"
        "    return x * 3\n"
        "torch.compile(double, backend='eager')(torch.ones(2))\n"
        "torch.compile(triple, backend='eager')(torch.ones(2))\n"
        "print([found['line'] for found in describe()['skipped']])\n",
    )
    assert run(sys.executable, script, cwd=tmp_path).stdout.strip() == "[6]"


# -- times of nodes


def passes(model: nn.Module, inputs: torch.Tensor, count: int = 16) -> Recorder:
    recorder = Recorder()
    recorder.clock = time.thread_time_ns  # on a CPU: what else runs here takes none of it
    with AutogradGraphHook().install(recorder):
        for _ in range(count):
            loss = model(inputs).square().mean()
            tell_of_pass(recorder, loss)
            loss.backward()
    return recorder


def test_a_node_takes_the_time_until_the_next_one_begins_and_the_products_most_of_it():
    recorder = passes(
        nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4)), torch.ones(300, 400)
    )
    total = recorder.facts["graph"]["total"]
    unaligned = recorder.facts["graph"]["unaligned"]  # the second layer alone
    assert 0 < unaligned["backward_ns"] < total["backward_ns"] / 2
    # No gradient goes to the data: the first layer has one product in the backward pass.
    assert unaligned["forward_ns"] == unaligned["backward_ns"] / 2
    assert total["forward_ns"] > total["backward_ns"] / 2


def test_the_clocks_are_gone_after_the_passes_that_were_timed():
    model = nn.Linear(3, 3)
    seen: list[int] = []
    recorder = Recorder()
    with AutogradGraphHook().install(recorder):
        for _ in range(11):
            loss = model(torch.ones(2, 3)).sum()
            tell_of_pass(recorder, loss)
            loss.backward(retain_graph=True)
    recorder.clock = lambda: seen.append(1) or 0  # type: ignore[func-returns-value]
    loss.backward()
    assert not seen


def test_what_the_script_profiles_holds_no_operation_of_ours():
    with torch.profiler.profile() as profiler:
        settings_now(Recorder())
    assert [event.name for event in profiler.events()] == []
