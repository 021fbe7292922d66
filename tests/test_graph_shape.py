"""How the operations of a graph hang together: recurrences, and how many rows its products have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from diagnose.core.graph import Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.program import Calls, Program
from diagnose.hooks._graph import walk
from diagnose.hooks._graph_facts import summarize
from diagnose.hooks._padding import padding_beside, padding_of
from diagnose.rules._examples import profile
from diagnose.rules.padding_waste import PaddingWaste
from diagnose.rules.small_operators import SAVED, SAVED_SEQUENTIAL, SmallOperators

TURNS = 50


def graph_of(loss: torch.Tensor) -> Graph:
    facts = summarize(*walk(loss.grad_fn), set())
    known = ("num_nodes", "names", "small_depth", "product_rows")
    works = {name: Work(**facts[name]) for name in ("total", "small_ops")}
    return Graph(**{name: facts[name] for name in known}, **works)


def lstm_by_cells() -> torch.Tensor:
    cell, x = nn.LSTMCell(8, 16), torch.randn(TURNS, 4, 8)
    h = c = torch.zeros(4, 16)
    for t in range(TURNS):
        h, c = cell(x[t], (h, c))
    return h.sum()


def gru_by_cells() -> torch.Tensor:
    cell, x, h = nn.GRUCell(8, 16), torch.randn(TURNS, 4, 8), torch.zeros(4, 16)
    for t in range(TURNS):
        h = cell(x[t], h)
    return h.sum()


def euler() -> torch.Tensor:
    f, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), torch.randn(4, 8)
    for _ in range(TURNS):
        x = x + 0.1 * f(x)
    return x.sum()


def sample_by_sample() -> torch.Tensor:
    f, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), torch.randn(TURNS, 8)
    return torch.stack([f(row).pow(2).sum() for row in x]).mean()


def sums_of_samples() -> torch.Tensor:
    f, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), torch.randn(TURNS, 8)
    total = torch.zeros(8)
    for row in x:
        total = total + f(row).sigmoid().mul(row)
    return total.sum()


def column_by_column() -> torch.Tensor:
    weight, x = nn.Parameter(torch.ones(TURNS)), torch.randn(4, TURNS)
    return torch.stack([(x[:, i] * weight[i] - 0.5).tanh().abs() for i in range(TURNS)], 1).sum()


def term_by_term() -> torch.Tensor:
    places = torch.randn(4, TURNS + 1, 3, requires_grad=True)
    terms = ((places[:, i] - places[:, i + 1]).norm(dim=-1).square().mean() for i in range(TURNS))
    return sum(terms, torch.zeros(()))


@pytest.mark.parametrize("model", [lstm_by_cells, gru_by_cells, euler])
def test_of_a_recurrence_only_what_compiling_saves_is_promised(model):
    finding = SmallOperators().check(profile(step_ms=20, program=Program(graph=graph_of(model()))))
    assert finding is not None
    assert "nn.LSTM" in finding.fix
    assert finding.high_ns == pytest.approx(
        SAVED_SEQUENTIAL[2] / SAVED_SEQUENTIAL[1] * finding.lost_ns_per_step
    )


@pytest.mark.parametrize("model", [sample_by_sample, sums_of_samples, column_by_column, term_by_term])
def test_a_loop_whose_turns_need_not_wait_for_each_other_can_be_one_operation(model):
    finding = SmallOperators().check(profile(step_ms=20, program=Program(graph=graph_of(model()))))
    assert finding is not None
    assert "one operation on a large one" in finding.fix
    assert finding.high_ns == pytest.approx(SAVED[2] / SAVED[1] * finding.lost_ns_per_step)


def test_tiny_operators_are_told_also_where_several_passes_make_a_step():
    program = Program(graph=graph_of(sample_by_sample()))

    def found(passes: float, step_ms: float) -> bool:
        each = profile(step_ms=step_ms, program=program)
        each = replace(each, steps=replace(each.steps, passes=passes))
        return SmallOperators().check(each) is not None

    assert found(1, 20) and found(8, 160)
    assert not found(1, 160), "few and slow"


def clocked(loss: torch.Tensor, *, select_ns: int = 10_000) -> dict[str, Any]:
    """Returns the facts of a graph whose nodes took 10 us each, and slices so long."""
    nodes, truncated = walk(loss.grad_fn)
    for node in nodes:
        node.backward_ns = select_ns if node.name == "Select" else 10_000
    return summarize(nodes, truncated, set())


def test_the_slices_that_tiny_operations_work_on_are_part_of_what_their_loop_takes():
    facts = clocked(column_by_column())
    small, total = facts["small_ops"], facts["total"]
    assert small["backward_ns"] == 10_000 * (small["num_ops"] + TURNS)
    works = {name: Work(**facts[name]) for name in ("total", "small_ops")}
    graph = Graph(**{name: facts[name] for name in ("num_nodes", "names", "small_depth")}, **works)
    example = profile(step_ms=20, program=Program(graph=graph))
    finding = SmallOperators().check(example)
    assert finding is not None
    part = small["backward_ns"] / total["backward_ns"]
    assert finding.lost_ns[Phase.BACKWARD] == pytest.approx(
        SAVED[1] * part * example.spent_ns(Phase.BACKWARD)
    )


def test_slices_that_compute_and_views_of_large_operations_are_no_part_of_it():
    facts = clocked(column_by_column(), select_ns=1_000_000)
    assert facts["small_ops"]["backward_ns"] == 10_000 * facts["small_ops"]["num_ops"], "a large gradient"
    weight = torch.randn(256, 256, requires_grad=True)
    facts = clocked(((weight @ weight).t() @ weight.t()).relu().mean())
    assert facts["small_ops"]["backward_ns"] == 10_000 * facts["small_ops"]["num_ops"]


# -- padding

LENGTHS = [8 + 3 * number for number in range(16)]


class Reader(nn.Module):
    """Computes an embedded batch as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words = nn.EmbeddingBag(50, 32) if how == "bag" else nn.Embedding(50, 32, padding_idx=0)
        self.rnn = nn.LSTM(32, 32, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.how == "packed":
            packed = pack_padded_sequence(x, (ids != 0).sum(1), batch_first=True, enforce_sorted=False)
            return self.mlp(self.rnn(packed)[0].data)
        return self.mlp(x[ids != 0] if self.how == "unpadded" else x)


@pytest.mark.parametrize(
    ("how", "is_wasted"), [("padded", True), ("packed", False), ("unpadded", False), ("bag", False)]
)
def test_a_model_that_leaves_padding_out_wastes_none(how: str, is_wasted: bool):
    ids = pad_sequence([torch.randint(1, 50, (length,)) for length in LENGTHS], batch_first=True)
    padding = padding_of(ids)
    assert padding is not None
    share = padding.padding / padding.tokens
    assert share > 0.3
    graph = graph_of(F.log_softmax(Reader(how)(ids), -1).mean())
    calls = Calls(num_steps=5, padding_share=share, padded_tokens=padding.tokens)
    finding = PaddingWaste().check(profile(program=Program(calls=calls, graph=graph)))
    assert (finding is not None) is is_wasted


class Recommender(nn.Module):
    """Scores items for users by what they have bought, of which each is looked at, or only their mean."""

    def __init__(self, *, looks_at_each: bool) -> None:
        super().__init__()
        self.looks_at_each = looks_at_each
        self.users, self.items = nn.Embedding(50, 32), nn.Embedding(50, 32, padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))

    def forward(self, user: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        seen = self.items(history) + self.users(user)[:, None]
        return self.mlp(seen).mean(1) if self.looks_at_each else self.mlp(seen.mean(1))


@pytest.mark.parametrize("looks_at_each", [True, False])
def test_padding_beside_the_first_input_counts_where_a_model_looks_at_each_token(looks_at_each: bool):
    history = pad_sequence([torch.randint(1, 50, (length,)) for length in LENGTHS], batch_first=True)
    given = (torch.arange(len(LENGTHS)) % 50, history)
    padding = padding_beside(given)
    assert padding is not None
    graph = graph_of(F.log_softmax(Recommender(looks_at_each=looks_at_each)(*given), -1).mean())
    calls = Calls(
        num_steps=5,
        padding_share=padding.padding / padding.tokens,
        padded_tokens=padding.tokens,
        padded_beside=True,
    )
    finding = PaddingWaste().check(profile(program=Program(calls=calls, graph=graph)))
    assert (finding is not None) is looks_at_each


@pytest.mark.parametrize("kind", ["attention", "fused_attention"])
def test_the_time_of_attention_goes_with_the_square_of_the_tokens(kind: str):
    calls = Calls(num_steps=5, padding_share=0.5)

    def lost_ms(attention: float) -> float:
        def work(part: float) -> Work:
            return Work(num_ops=1, backward_ns=part * 1e6, forward_ns=part * 1e6)

        graph = Graph(num_nodes=9, total=work(1), **{kind: work(attention)})
        finding = PaddingWaste().check(profile(program=Program(calls=calls, graph=graph)))
        assert finding is not None
        return finding.lost_ns_per_step / 1e6

    assert lost_ms(attention=1.0) == pytest.approx(1.5 * lost_ms(attention=0.0))
    assert lost_ms(attention=0.5) == pytest.approx(1.25 * lost_ms(attention=0.0))


def test_a_tensor_in_float64_is_seen_in_what_is_computed_with_it():
    """A filter bank that was designed in float64 and never converted: its parameters are few bytes."""
    layer, filters = nn.Conv1d(1, 8, 3), nn.Parameter(torch.randn(8, 1, 5, dtype=torch.float64))
    wave = torch.randn(4, 1, 1024)
    bands = nn.functional.conv1d(wave.double(), filters).abs()
    loss = (bands.float().mean(1, keepdim=True) + layer(wave)[..., :1020].mean(1, keepdim=True)).sum()
    facts = summarize(*walk(loss.grad_fn), set())
    assert facts["double"]["num_ops"] == 2, "the filters and their absolute values"
    plain = summarize(*walk(layer(wave).mean().double().square().grad_fn), set())
    assert plain["double"]["num_ops"] == 0


def test_fused_attention_is_told_from_the_other_operations():
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    loss = F.scaled_dot_product_attention(q, q, q).relu().sum()
    facts = summarize(*walk(loss.grad_fn), set())
    assert facts["fused_attention"]["num_ops"] == 1
