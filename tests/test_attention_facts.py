"""Attention and softmax that are written out are found in the graph, whatever is done to the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from diagnose.hooks._graph import walk
from diagnose.hooks._graph_facts import summarize


def graph(loss: torch.Tensor, *, recomputing: bool = False, wanted: set[int] = frozenset()) -> dict:  # type: ignore[assignment, type-arg]
    return summarize(*walk(loss.grad_fn, recomputing), wanted)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.transpose(-1, -2) / 3).masked_fill(~mask, float("-inf"))


def test_attention_that_is_written_out_is_found_and_the_fused_one_is_not():
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    facts = graph((F.dropout(scores(q, k).softmax(-1), 0.1) @ v).sum())
    assert (facts["num_attentions"], facts["attention_keys"]) == (1, k.shape[-2])
    assert graph(F.scaled_dot_product_attention(q, k, v).sum())["num_attentions"] == 0
    assert graph(scores(q, k).softmax(-1).sum())["num_attentions"] == 0, "no product behind it"


def exp_by_sum(s: torch.Tensor) -> torch.Tensor:
    w = (s - s.amax(-1, keepdim=True)).exp()
    return w / (w.sum(-1, keepdim=True) + 1e-6)


def of_logarithms(s: torch.Tensor) -> torch.Tensor:
    return (s - s.logsumexp(-1, keepdim=True)).exp()


def by_log_softmax(s: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(s, -1).exp()


@pytest.mark.parametrize("weights", [exp_by_sum, of_logarithms, by_log_softmax])
def test_a_softmax_that_is_written_out_is_one(weights: Callable[[torch.Tensor], torch.Tensor]):
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    facts = graph((weights(scores(q, k)) @ v).sum())
    assert (facts["num_attentions"], facts["attention_keys"]) == (1, k.shape[-2])
    assert facts["attention_products"]["num_ops"] == 2
    assert not facts["attention_drops"]
    assert graph(weights(scores(q, k)).sum())["num_attentions"] == 0, "no product behind it"


def test_exponentials_that_are_not_divided_by_their_sum_are_no_attention():
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    w = (q @ k.transpose(-1, -2)).exp()
    assert graph((w @ v).sum())["num_attentions"] == 0
    assert graph((w @ v).sum() + w.sum(-1).log().sum())["num_attentions"] == 0


def test_products_of_attention_that_are_summed_up_number_by_number_are_products():
    q, k, v = (torch.randn(2, 16, 8, requires_grad=True) for _ in range(3))
    w = (q[:, :, None] * k[:, None]).sum(-1).softmax(-1)
    facts = graph((w[..., None] * v[:, None]).sum(2).sum())
    assert facts["num_attentions"] == 1
    assert not facts["attention_drops"]
    assert graph((w * torch.rand(16)).sum())["num_attentions"] == 0, "weights that are only scaled"


def test_what_is_done_to_the_weights_of_attention_is_told():
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    assert graph((F.dropout(scores(q, k).softmax(-1), 0.1) @ v).sum())["attention_drops"]
    assert not graph((scores(q, k).softmax(-1) @ v).sum())["attention_drops"]
    assert not graph((F.dropout(scores(q, k).softmax(-1) @ v, 0.1)).sum())["attention_drops"], (
        "its result's"
    )


def weights_and(read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A loss of attention, and of what else reads its weights."""
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    w = scores(q, k).softmax(-1)
    return (w @ v).sum() + read(w).sum()


def test_attention_whose_weights_are_read_elsewhere_cannot_be_fused():
    assert graph(weights_and(lambda w: torch.zeros(())))["num_attentions"] == 1
    assert graph(weights_and(lambda w: w.detach().mean()))["num_attentions"] == 1, "it is only looked at"
    assert graph(weights_and(lambda w: w.mean(1)))["num_attentions"] == 0
    assert graph(weights_and(lambda w: w * w.clamp(min=1e-6).log()))["num_attentions"] == 0
    query, table = (torch.randn(2, 16, 8, requires_grad=True) for _ in range(2))
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    out, weights = module(query, table, table, need_weights=True)
    assert graph(out.sum())["num_attentions"] == 1
    assert graph(out.sum() + weights.square().sum())["num_attentions"] == 0
    assert graph(module(query, table, table, need_weights=False)[0].sum())["num_attentions"] == 0


@pytest.mark.parametrize("kind", ["router", "features", "one query"])
def test_a_softmax_between_products_that_is_no_attention_among_tokens_is_none(kind: str):
    x = torch.randn(2, 16, 8, requires_grad=True)
    if kind == "router":
        gates = torch.einsum("bsd,de->bse", x, nn.Parameter(torch.randn(8, 4))).softmax(-1)
        out = torch.einsum("bse,edf,bsd->bsf", gates, nn.Parameter(torch.randn(4, 8, 8)), x)
    elif kind == "features":
        to_q, to_k = (nn.Parameter(torch.randn(2, 8, 4)) for _ in range(2))
        q, k = (torch.einsum("bsd,hde->bhse", x, weight) for weight in (to_q, to_k))
        out = q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ x[:, None])
    else:
        query = nn.Linear(8, 8)(x.mean(1, keepdim=True))
        out = (query @ x.transpose(1, 2)).softmax(-1) @ x
    assert graph(out.sum())["num_attentions"] == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["matmul", "einsum", "baddbmm", "chunks", "float"])
def test_attention_is_found_however_it_is_written_and_whether_its_bias_is_trained(form: str, bias: bool):
    q, k, v = (torch.randn(4, 16, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(31, 4, requires_grad=bias)
    places = torch.arange(16)
    b = table[places[:, None] - places + 15].permute(2, 0, 1)
    if form == "matmul":
        out = ((q @ k.mT) * 0.35 + b).softmax(-1) @ v
    elif form == "einsum":
        s = torch.einsum("hid,hjd->hij", q, k) + b
        s[:, torch.ones(16, 16).triu(1).bool()] = float("-inf")
        out = torch.einsum("hij,hjd->hid", torch.softmax(s, dim=-1), v)
    elif form == "baddbmm":
        out = torch.bmm(F.softmax(torch.baddbmm(b, q, k.mT, alpha=0.35), dim=-1), v)
    elif form == "chunks":
        parts = zip(q.chunk(2), k.chunk(2), v.chunk(2), b.chunk(2), strict=True)
        out = torch.cat([(q @ k.mT + b).softmax(-1) @ v for q, k, v, b in parts])
    else:
        s = (q.bfloat16() @ k.bfloat16().mT).float() + b
        out = s.softmax(-1, dtype=torch.float32).bfloat16() @ v.bfloat16()
    facts = graph(out.sum())
    assert (facts["num_attentions"], facts["attention_keys"]) == (2 if form == "chunks" else 1, 16)
    assert facts["attention_biased"] is bias


def test_what_the_fused_kernels_want_four_axes_of_is_told():
    q, k, v = (torch.randn(4, 16, 8, requires_grad=True) for _ in range(3))
    flat = graph(F.scaled_dot_product_attention(q, k, v).sum())
    assert (flat["attention_axes"], flat["names"]["SafeSoftmax"]) == (3, 1)
    wide = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
    assert "SafeSoftmax" not in graph(wide.sum())["names"], "as OF_ONE_HEAD advises"
    assert graph(((q[:, None] @ k[:, None].mT).softmax(-1) @ v[:, None]).sum())["attention_axes"] == 4


@pytest.mark.parametrize(("axis", "places"), [(-1, 1), (2, 1), (1, 0), (-2, 0)])
def test_a_softmax_over_slots_is_no_attention(axis: int, places: int):
    q, k, v = (torch.randn(4, 16, 8, requires_grad=True) for _ in range(3))
    assert graph(((q @ k.mT).softmax(axis) @ v).sum())["num_attentions"] == places
