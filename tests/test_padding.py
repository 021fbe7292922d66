"""What is padding in a batch: values of one kind at the end of rows, or what follows the lengths beside."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from diagnose.core.program import Calls, Program
from diagnose.hooks._padding import padding_beside, padding_in, padding_of
from diagnose.hooks._recorder import Recorder
from diagnose.rules._examples import profile
from diagnose.rules.padding_waste import PaddingWaste
from tests.test_graph_shape import graph_of
from tests.test_model_calls import told


def test_padding_is_a_run_at_the_end_of_rows():
    full = torch.randint(1, 50, (8, 20))
    padded = full.clone()
    for row in range(8):
        padded[row, 10 + row :] = 0
    wasted = sum(10 - row for row in range(8))
    overlong = 3 * 8
    assert padding_of(padded) == (wasted, overlong, 160)
    assert padding_of(padded.flip(1)) == (wasted, overlong, 160), "padding on the left"
    assert padding_of(full) == (0, 0, 160)
    assert padding_of(full.float()) is None


def test_padding_of_columns_and_of_documents_is_seen_as_that_of_rows():
    lengths = torch.tensor([20, 5, 14, 9, 17, 6, 11, 19, 8, 13, 7, 18, 10, 15, 12, 16])
    rows = [torch.randint(1, 50, (int(length),)) for length in lengths]
    ids = pad_sequence(rows, batch_first=True)
    wasted = 16 * 20 - int(lengths.sum())
    assert padding_of(ids) == padding_of(ids.t()) == padding_of(ids.flip(1).t()) == (wasted, 0, 320)
    assert padding_of(ids.view(4, 4, 20)) == (wasted, 0, 320)
    assert padding_of(torch.randint(1, 50, (20, 16))) == (0, 0, 320)


def test_features_of_one_value_are_no_padding():
    table = torch.randint(1, 50, (64, 10))
    table[:, 3:6] = 0
    assert padding_of(table) == (0, 0, 640)
    pairs = torch.randint(1, 5000, (64, 2))
    pairs[40:, 0] = 17  # the last rows are of one user
    assert padding_of(pairs) is None
    digits = torch.zeros(8, 28, 28, dtype=torch.uint8)
    digits[:, :, 8:20] = 255
    assert padding_of(digits) is None


@pytest.mark.parametrize("features", [(), (3,)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [torch.tensor, list])
def test_padding_of_numbers_is_what_follows_the_lengths_beside_them(
    features: tuple[int, ...], batch_first: bool, kind: Any
):
    lengths = [37, 12, 21, 30]
    waves = pad_sequence([torch.randn(n, *features) for n in lengths], batch_first=batch_first)
    padding = padding_in((waves, torch.arange(4), kind(lengths)))
    assert padding == (4 * 37 - 100, 0, 4 * 37)
    assert padding_in({"wave": waves, "target": torch.arange(4)}) is None, "nobody tells"
    longer = F.pad(waves.movedim(1 - batch_first, 0), (0, 0) * len(features) + (0, 13))
    assert padding_in(({"wave": longer}, {"n": kind(lengths)})) == (4 * 50 - 100, 4 * 13, 4 * 50)


def test_time_may_come_after_features_and_be_too_long_to_be_looked_at_whole():
    lengths = torch.tensor([300_000, 40_000, 160_001, 299_999])
    waves = pad_sequence([torch.randn(int(n)) for n in lengths], batch_first=True)
    wasted = 4 * 300_000 - int(lengths.sum())
    assert padding_in((waves, lengths)) == (wasted, 0, 4 * 300_000)
    mels = torch.randn(4, 80, 60)
    frames = torch.tensor([60, 41, 58, 3])
    mels[torch.arange(60).expand(4, 80, 60) >= frames[:, None, None]] = -11.5
    assert padding_in((mels, frames)) == (240 - 162, 0, 240)


def test_numbers_that_are_no_lengths_tell_of_no_padding():
    images, classes = torch.randn(6, 28, 28), torch.tensor([1, 3, 9, 4, 2, 7])
    assert padding_in((images, classes)) is None
    images[:, 20:] = 0  # below each digit the paper is empty
    assert padding_in((images, classes)) is None
    assert padding_in((torch.zeros(6, 28), classes)) is None
    assert padding_in((torch.randn(6, 28), torch.full((6,), 28))) is None


def test_rows_that_are_filled_up_to_a_multiple_are_not_too_long():
    def rows(length: int) -> torch.Tensor:
        ids = torch.randint(1, 50, (8, 50))
        ids[0, 40:] = 0
        return torch.nn.functional.pad(ids, (0, length - 50))

    padding = padding_of(rows(56))
    assert padding == (10 + 8 * 6, 0, 8 * 56), "50 tokens need 56 columns"
    padding = padding_of(rows(57))
    assert padding == (10 + 8 * 7, 8 * 7, 8 * 57)
    padding = padding_of(rows(64))
    assert padding == (10 + 8 * 14, 8 * 14, 8 * 64), "and not 64"


@pytest.mark.parametrize("features", [(), (3,)])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "told", [torch.Tensor.bool, torch.Tensor.float, torch.Tensor.long, torch.Tensor.logical_not]
)
def test_padding_of_numbers_is_what_a_mask_beside_them_says(
    features: tuple[int, ...], batch_first: bool, told: Any
):
    lengths = torch.tensor([37, 12, 21, 30])
    waves = pad_sequence([torch.randn(int(n), *features) for n in lengths], batch_first=batch_first)
    mask = told((torch.arange(37) < lengths[:, None]).long())
    for given in ((waves, mask), {"x": waves, "mask": mask.t(), "y": torch.arange(4)}):
        assert padding_in(given) == (4 * 37 - 100, 0, 4 * 37)


def test_masks_that_say_something_else_tell_of_no_padding():
    waves, places = torch.randn(6, 40, 3), torch.arange(40)
    assert padding_in((waves, torch.ones(6, 40))) is None, "nothing is masked"
    lengths = torch.tensor([40, 20, 31, 25, 9, 33])
    assert padding_in((waves, places < lengths[:, None])) is None, "what is masked is there"
    hidden = torch.rand(6, 40) < 0.4
    assert padding_in((waves * ~hidden[:, :, None], hidden)) is None, (
        "places here and there, to be filled in"
    )
    assert padding_in((torch.randn(40, 40), torch.ones(40, 40).tril())) is None, "who sees whom"
    assert padding_in((waves, torch.randint(2, (6, 1)))) is None, "classes"
    known = (places < 30).expand(6, 40)
    assert padding_in((waves * known[:, :, None], known)) is None, "the last quarter is to be foretold"
    weights = torch.where(places < lengths[:, None], 0.5, 0.0)
    assert padding_in((waves * (weights > 0)[:, :, None], weights)) is None


def test_token_ids_beside_the_first_tensor_count_for_themselves():
    rows = [torch.randint(1, 50, (n,)) for n in (20, 5, 14, 9)]
    history, user = pad_sequence(rows, batch_first=True), torch.arange(4)
    assert padding_beside((user, {"history": history})) == (80 - 48, 0, 80)
    assert padding_beside((torch.randn(4, 3, 8, 8), torch.randint(1, 9, (4, 3)), history)) == (32, 0, 80)
    assert padding_beside((torch.arange(5), history)) is None, "not of the same samples"
    assert padding_beside((user, history.float())) is None
    assert padding_beside((user, torch.randint(1, 50, (4, 20)))) == (0, 0, 80), "a table"
    assert padding_beside((history,)) is None, "the first tensor itself"
    features = torch.randn(4, 20, 3) * (history > 0)[:, :, None]
    assert padding_beside((features, history)) == (32, 0, 80), "filled up like the tokens"
    assert padding_beside((features.flip(1), history.flip(1))) == (32, 0, 80)


def test_masks_labels_and_kinds_beside_the_first_tensor_are_no_padding():
    embedded = torch.randn(4, 21, 16)
    labels = torch.randint(5, 50, (4, 21))
    for row, asked in enumerate((9, 14, 11, 12)):
        labels[row, :asked] = -100  # the prompt
    atoms = torch.tensor([6] * 9 + [8] * 4 + [1] * 8).expand(4, 21)
    ends = torch.randint(1, 50, (4, 21))
    for row, length in enumerate((9, 14, 21, 12)):
        ends[row, length:] = 0  # silence: the frames go on
    speakers = torch.zeros(4, 21, dtype=torch.long)
    for beside in (torch.ones_like(labels), speakers, labels, atoms, ends):
        assert not padding_beside({"inputs_embeds": embedded, "beside": beside})
        assert not padding_in({"inputs_embeds": embedded, "beside": beside})
    mask = (torch.arange(21) < torch.tensor([[21], [9], [14], [12]])).long()
    assert padding_beside((torch.randn(4, 3), mask)) is None


def test_a_first_tensor_is_no_mask_of_its_own_and_an_empty_one_says_nothing():
    levels = (torch.arange(20) < torch.tensor([[20], [5], [14], [9]])).float()
    assert padding_in(levels) is None, "a thermometer code"
    assert padding_in((levels, torch.arange(4))) is None
    empty = torch.zeros(0, 20)
    assert padding_in((empty, empty.clone())) is None
    assert padding_in((torch.randn(4, 0), torch.zeros(4, 0))) is None


LENGTHS = torch.tensor([24, 9, 15, 3, 20, 12, 6, 18])


def masked(*features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that are 0 from some place on, and where they are not."""
    mask = (torch.arange(24) < LENGTHS[:, None]).float()
    return torch.randn(8, 24, *features) * mask.view(8, 24, *(1 for _ in features)), mask


def found_in(model: nn.Module, loaded: Any, *given: torch.Tensor) -> Any:
    """What the rule says of a model that is trained on what is given, of a loader's batch."""
    recorder, losses = Recorder(), []

    def step(_: int) -> None:
        for note in list(recorder.looks.on_batch):
            note(loaded)
        losses.append(model(*given).pow(2).mean())

    facts = told([model], step, recorder)
    calls = Calls(**{each.name: facts[each.name] for each in fields(Calls) if each.name in facts})
    if calls.padding_share is None:
        return None
    assert calls.padded_masked
    return PaddingWaste().check(profile(program=Program(calls=calls, graph=graph_of(losses[-1]))))


class OfAll(nn.Module):
    """Of visits beside each other, so many and no more, or of each of them."""

    def __init__(self, wide: nn.Module, *, each: bool) -> None:
        super().__init__()
        self.wide, self.each = wide, each

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.each:
            out = self.wide(x)
            return out[0] if isinstance(out, tuple) else out
        return self.wide(torch.cat([x, mask], 1))


def encoder(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 32), nn.GELU(), nn.Linear(32, 32))


def test_what_a_layer_of_a_fixed_width_takes_is_no_padding():
    x, mask = masked()
    assert found_in(OfAll(encoder(2 * 24), each=False), (x, mask), x, mask) is None


@pytest.mark.parametrize(
    "layer",
    [encoder(6), nn.GRU(6, 32, batch_first=True), nn.LSTM(6, 32, batch_first=True)],
    ids=["encoder", "gru", "lstm"],
)
def test_what_is_masked_counts_where_a_model_looks_at_each_place(layer: nn.Module):
    x, mask = masked(6)
    assert found_in(OfAll(layer, each=True), (x, mask), x, mask) is not None


def test_bands_that_some_pictures_lack_are_no_padding():
    x, mask = masked(4, 4)
    assert padding_in((x, mask)) is None
    assert padding_in((x, LENGTHS)) is not None, "lengths are another matter"


def test_what_is_masked_for_the_model_to_find_it_is_no_padding():
    x, mask = masked(6)
    series = torch.randn(8, 24, 6)
    model = OfAll(encoder(6), each=True)
    assert found_in(model, (series,), series * mask[:, :, None], mask) is None
    assert padding_in((x, mask, series)) is None
    assert padding_in((x, mask), [torch.randn(8, 30, 6)]) is None, "the loop cuts windows out of it"
    assert padding_in((x, mask), [torch.randn(8, 24)]) is None, "an axis was added to it"
    beside = [torch.randn(8, 32), torch.rand(8, 200).round()]
    assert padding_in((x, mask), beside) is not None, "numbers and targets of a sample have no time"
    longer = F.pad(series[:, :, :1], (0, 5))
    assert padding_in((x, mask, longer * mask[:, :, None])) is not None, "the target is filled up, too"
    assert found_in(model, (x, mask), x - 0.5 * mask[:, :, None], mask) is not None
