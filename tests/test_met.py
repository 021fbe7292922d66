"""Modules are met as they come and go, though one may get the identity of one before it."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from diagnose.hooks._met import was_trained
from diagnose.hooks._recorder import Recorder
from tests.fakes import FakeClock, measured


def test_a_model_that_gets_the_identity_of_one_that_is_gone_is_met_all_the_same():
    recorder, met, identities = Recorder(), list[bool](), set[int]()
    for _ in range(20):
        model = nn.Linear(4, 1)
        identities.add(id(model))
        assert not was_trained(recorder.met.models, model)
        recorder.met.model_appears(model)
        met.append(recorder.met.live_modules() == [model] and was_trained(recorder.met.models, model))
        del model
    assert all(met)
    assert len(identities) < 20, "none was given out twice: nothing was tested"
    assert len(recorder.met.modules) == 1


def test_each_model_that_a_script_trains_one_after_the_other_is_met_when_it_is_called():
    with measured(FakeClock()) as recorder:
        for _ in range(5):
            model = nn.Linear(4, 1)
            for rows in torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2):
                nn.MSELoss()(model(rows), torch.ones(2, 1)).backward()
            assert model in recorder.met.live_modules()
            del model


def test_a_loss_that_is_made_anew_for_each_step_is_as_good_as_known():
    models = Recorder().met.models
    loss = nn.CrossEntropyLoss()
    models[id(loss)] = weakref.ref(nn.CrossEntropyLoss())
    assert was_trained(models, loss)
    model = nn.Linear(4, 1)
    models[id(model)] = weakref.ref(nn.CrossEntropyLoss())
    assert not was_trained(models, model)
