"""Loops told from layers by the shape of a graph."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from diagnose.hooks import _graph
from diagnose.hooks._graph import walk
from diagnose.hooks._graph_loops import looped_of, recurrent_weights, summarize_loops
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.autograd_graph import AutogradGraphHook
from tests.fakes import tell_of_pass

TURNS = 16
MODULES: list[nn.Module] = []
"""Those that the last loss was made with: their parameters have to live as long as its graph is read."""


def kept(module: nn.Module) -> nn.Module:
    MODULES.append(module)
    return module


def body(depth: int = 20) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(depth)]
    return kept(nn.Sequential(*layers))


def parameter(*size: int) -> nn.Parameter:
    return next(kept(nn.ParameterList([nn.Parameter(torch.rand(size))])).parameters())


# -- loops


def prototypes() -> torch.Tensor:
    """A sound model with a head that goes through the rows of one parameter."""
    features, rows = body()(torch.randn(8, 32)), parameter(TURNS, 32)
    near = [torch.log1p(1 / ((features - row.view(1, -1)).pow(2).sum(1) + 1e-4)) for row in rows]
    return torch.stack(near, 1).sum()


def groups() -> torch.Tensor:
    """A normalization, group by group, in a helper."""

    def whiten(part: torch.Tensor) -> torch.Tensor:
        return part / (part.pow(2).mean(-1, keepdim=True) + 1e-4).sqrt()

    parts = body()(torch.randn(8, 32)).chunk(TURNS, 1)
    return torch.cat([whiten(part - part.mean(-1, keepdim=True)) for part in parts], 1).sum()


def conditional_field() -> torch.Tensor:
    """A CRF behind an LSTM that torch computes step by step, as its inputs are packed."""
    lstm, score, moves = kept(nn.LSTM(8, 16, batch_first=True)), kept(nn.Linear(16, 5)), parameter(5, 5)
    packed = pack_padded_sequence(torch.randn(4, 30, 8), torch.tensor([30, 30, 20, 9]), batch_first=True)
    marks = score(pad_packed_sequence(lstm(packed)[0], batch_first=True)[0])
    alpha = marks[:, 0]
    for t in range(1, 30):
        alpha = torch.logsumexp(alpha.unsqueeze(2) + moves, 1) + marks[:, t]
    return alpha.logsumexp(1).sum()


def cells() -> torch.Tensor:
    """A loop over a cell behind layers."""
    x, cell = body()(torch.randn(40, 4, 32)), kept(nn.GRUCell(32, 16))
    state = torch.zeros(4, 16)
    for row in x:
        state = cell(row, state)
    return state.sum()


# -- none


def layers() -> torch.Tensor:
    return body(40)(torch.randn(8, 32)).sum()


def three_inputs() -> torch.Tensor:
    model = body()
    anchor, alike, other = (model(torch.randn(8, 32)) for _ in range(3))
    return F.triplet_margin_loss(anchor, alike, other)


def frozen_layers() -> torch.Tensor:
    """Only what is put in front is trained."""
    model, prompt = body(40).requires_grad_(False), parameter(8, 32)
    return model(torch.randn(8, 32) + prompt).sum()


def residual_couplings() -> torch.Tensor:
    """Steps of a flow: some 20 operations each, and four parameters of their own."""
    a, b = torch.randn(8, 16), torch.randn(8, 16)
    total = torch.zeros(8)
    for _ in range(12):
        net = kept(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32)))
        scale, shift = net(a).chunk(2, 1)
        scale = 2 * torch.tanh(scale / 2)
        a, b = b * scale.exp() + shift, a
        total = total + scale.sum(1)
    return (a.pow(2).sum(1) / 2 - total).mean() + b.sum()


def experts() -> torch.Tensor:
    x = torch.randn(64, 32)
    found = [kept(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))(x) for _ in range(16)]
    return torch.stack(found).mean(0).sum()


def gru_in_torch() -> torch.Tensor:
    return kept(nn.GRU(8, 16, batch_first=True, bidirectional=True))(torch.randn(4, 50, 8))[0].sum()


def packed() -> torch.Tensor:
    lstm = kept(nn.LSTM(8, 16, batch_first=True))
    rows = pack_padded_sequence(torch.randn(4, 50, 8), torch.tensor([50, 50, 20, 9]), batch_first=True)
    return lstm(rows)[0].data.sum()


def large_turns() -> torch.Tensor:
    """A loop whose turns have something to do."""
    x, weight = torch.randn(64, 4096), parameter(4096)
    return torch.stack([(x * weight + shift).tanh().mean() for shift in range(TURNS)]).sum()


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a walk come to its end on a busy machine, too."""
    monkeypatch.setattr(_graph, "MAX_TIME_NS", 10**11)


def loops_in(make: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """How many operations of a graph are of loops, and of how many each needs the one before."""
    MODULES.clear()
    nodes, _ = walk(make().grad_fn)
    facts = summarize_loops(nodes, recurrent_weights(MODULES))
    return facts["looped"]["num_ops"], facts["looped_depth"]


@pytest.mark.parametrize(("make", "least"), [(prototypes, 5 * TURNS), (groups, 5 * TURNS)])
def test_turns_side_by_side_are_found_in_a_model_that_is_sound_for_the_rest(make, least):
    found, depth = loops_in(make)
    assert least <= found <= 9 * TURNS
    assert depth < 10, "none needs the one before"


@pytest.mark.parametrize(("make", "turns", "most"), [(conditional_field, 29, 5), (cells, 40, 16)])
def test_a_recurrence_beside_layers_or_beside_one_of_torchs_own_is_found(make, turns, most):
    found, depth = loops_in(make)
    assert 2 * turns <= found <= most * turns
    assert depth >= turns


@pytest.mark.parametrize(
    "make",
    [
        *(layers, three_inputs, frozen_layers, residual_couplings, experts, gru_in_torch, packed),
        large_turns,
    ],
)
def test_layers_with_parameters_of_their_own_and_torchs_loops_are_none(make):
    assert loops_in(make)[0] < 40


def test_what_was_timed_is_no_loops_where_it_takes_longer_than_a_call():
    MODULES.clear()
    nodes, _ = walk(prototypes().grad_fn)
    for node in nodes:
        node.backward_ns = 400_000
    assert looped_of(nodes, {}) == []


def test_the_hook_tells_loops_and_what_threads_could_divide():
    weight, rows = nn.Parameter(torch.rand(400, 400)), nn.Parameter(torch.rand(30, 8))
    recorder = Recorder()
    recorder.clock = time.thread_time_ns  # on a CPU: what else runs here takes none of it
    with AutogradGraphHook().install(recorder):
        for step in range(16):
            turns = torch.stack([(row - 1).tanh().pow(2).sum() for row in rows])
            loss = (torch.ones(400, 400) @ weight @ weight).mean() + turns.sum()
            tell_of_pass(recorder, loss)
            loss.backward()
            graph = recorder.facts.get("graph", {})
            # A call that something else held up looks too large for a turn.
            assert step < 8 or 4 * 29 <= graph["looped"]["num_ops"] <= 4 * 30
            assert not 8 < step < 14 or graph["heavy"] is None, "nothing was timed yet"
    graph = recorder.facts["graph"]
    assert 0 < graph["looped"]["backward_ns"] < graph["total"]["backward_ns"]
    assert 1 <= graph["heavy"]["num_ops"] <= 8, "products, and what was held up"
    assert graph["heavy"]["backward_ns"] > graph["looped"]["backward_ns"] / 4


def test_of_a_part_of_a_graph_no_loop_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_graph, "MAX_NODES", 400)
    recorder = Recorder()
    with AutogradGraphHook().install(recorder):
        for _ in range(10):
            loss = gru_in_torch()
            tell_of_pass(recorder, loss)
            loss.backward()
    assert recorder.facts["graph"]["truncated"]
    assert "looped" not in recorder.facts["graph"]
