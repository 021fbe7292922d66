"""Scripts whose parameters no optimizer of torch's updates have steps, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.analysis.profile import load_profile
from tests.fakes import FakeClock, measured, steps_of
from tests.running import DIAGNOSE, only_run, run, write


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None


def without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
            p.grad.zero_()


def trained(passes: int, update: Callable[[nn.Module], Any], *, every: int = 1) -> tuple[int, list[str]]:
    """Returns the number of steps that were found, and what was said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with measured(FakeClock()) as recorder:
        for number in range(1, passes + 1):
            model(torch.randn(16, 4)).square().mean().backward()
            if number % every == 0:
                update(model)
        recorder.finish()
        return len(steps_of(recorder)), list(recorder.notes)


@pytest.mark.parametrize("update", [by_data, without_gradients])
def test_a_step_ends_with_each_pass_after_which_the_parameters_change(update: Callable[[nn.Module], Any]):
    steps, notes = trained(40, update)
    assert 40 - 5 <= steps <= 40
    assert [note for note in notes if "every backward pass" in note]


def test_passes_that_only_add_to_gradients_end_no_step():
    steps, notes = trained(80, by_data, every=4)
    assert 20 - 5 <= steps <= 20
    assert [note for note in notes if "every 4th backward pass" in note]


def test_nothing_is_taken_for_a_step_while_the_parameters_stay_as_they_are():
    assert trained(40, lambda model: None) == (0, [])


def test_an_optimizer_of_torchs_is_the_one_that_steps():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with measured(FakeClock()) as recorder:
        for _ in range(20):
            model(torch.randn(16, 4)).square().mean().backward()
            with torch.no_grad():
                model.weight.clamp_(-1, 1)
            optimizer.step()
        recorder.finish()
        assert len(steps_of(recorder)) == 20
        assert not recorder.notes


def test_parameters_that_are_made_anew_in_each_pass_change():
    params = [torch.ones(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)]
    with measured(FakeClock()) as recorder:
        for _ in range(40):
            loss = (torch.randn(16, 4) @ params[0] + params[1]).square().mean()
            gradients = torch.autograd.grad(loss, params)
            updated = [p - 0.1 * g for p, g in zip(params, gradients, strict=True)]
            params = [p.detach().requires_grad_() for p in updated]
        recorder.finish()
        assert 40 - 5 <= len(steps_of(recorder)) <= 40


@pytest.mark.parametrize("rate, num_steps", [(0.1, 35), (0.0, 0)])
def test_parameters_that_go_through_torch_func_change_where_they_are_updated(rate: float, num_steps: int):
    model = nn.Linear(4, 1)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (rows,)).square().mean()

    with measured(FakeClock()) as recorder:
        for _ in range(40):
            gradients = torch.func.grad(loss)(params, torch.randn(16, 4))
            params = {name: p - rate * gradients[name] for name, p in params.items()}
        recorder.finish()
        assert num_steps <= len(steps_of(recorder)) <= 40 * (num_steps > 0)
        assert len(recorder.notes) == (num_steps > 0)


def test_gradients_of_one_input_after_another_are_no_update():
    model = nn.Linear(4, 1).requires_grad_(False)
    with measured(FakeClock()) as recorder:
        for _ in range(20):
            rows = torch.randn(16, 4, requires_grad=True)
            torch.autograd.grad(model(rows).sum(), rows)
        assert not recorder.notes


def test_where_an_optimizer_was_made_the_note_does_not_say_that_there_is_none():
    """Of a compiled `step()` no hook of torch's is left, and it looks like this."""
    model = nn.Linear(4, 1)
    with measured(FakeClock()) as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            model(torch.randn(16, 4)).square().mean().backward()
            by_data(model)
            optimizer.zero_grad()
        recorder.finish()
        assert len(steps_of(recorder)) >= 15
        (note,) = recorder.notes
    assert note == (
        "no optimizer of torch's is seen to step here, and the parameters change: a step ends with every "
        "backward pass. One was made; if its `step()` is compiled, it cannot be seen. If that is wrong: "
        "import diagnose; diagnose.step()"
    )


def test_an_attack_on_the_inputs_is_no_update():
    model = nn.Linear(4, 1).requires_grad_()
    with measured(FakeClock()) as recorder:
        delta = torch.zeros(16, 4, requires_grad=True)
        for _ in range(10):
            loss = model(torch.randn(16, 4) + delta).square().mean()
            (gradient,) = torch.autograd.grad(loss, delta)
            delta.data.add_(gradient.sign(), alpha=0.1)
        assert not recorder.notes


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
data = torch.utils.data.TensorDataset(torch.randn(1280, 64), torch.randn(1280, 1))
for epoch in range(10):
    for x, y in torch.utils.data.DataLoader(data, batch_size=64):
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.01)
print(sum(p.sum().item() for p in model.parameters()))
"""


@pytest.mark.extended
def test_a_run_of_such_a_script_has_a_ledger_and_the_same_weights(tmp_path: Path):
    script = write(tmp_path / "train.py", SCRIPT)
    ended = run(*DIAGNOSE, "--quiet", script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    seen = load_profile(only_run(tmp_path))
    assert 190 <= seen.steps.count <= 200
    assert seen.throughput.samples_per_s is not None
    assert any("no optimizer of torch's steps here" in note for note in seen.notes)
    assert run(DIAGNOSE[0], script, cwd=tmp_path).stdout == ended.stdout
