"""The optimizer's state dealt out to the ranks of a live job, on real ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from diagnose.actions._zero_peers import described, made, tensors
from diagnose.actions._zero_shares import digest, split
from diagnose.actions.zero_one import CLASSES
from tests.running import SCRIPTS, run_ranks
from tests.test_tuner_ranks import train

NAMES = (*(kind.__name__ for kind in CLASSES), "fused AdamW")
APPLY = '[[action]]\nname = "zero-one"\n'

each_optimizer = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks printed."""
    return [json.loads(ended.stdout) for ended in run_ranks("-m", "tests.scripts.zero_ranks")]


@pytest.mark.extended
@each_optimizer
def test_weights_and_state_are_those_of_the_script_alone_to_the_bit(ranks, name):
    for rank in ranks:
        (alone, ours), (its_state, our_state) = (
            rank["results"][name][what] for what in ("weights", "state")
        )
        assert ours == alone
        assert our_state == its_state


@pytest.mark.extended
@each_optimizer
def test_a_checkpoint_is_whole_on_whichever_ranks_ask_for_it(ranks, name):
    for rank, steps in zip(ranks, (["3", "4", "10", "11"], ["4"]), strict=True):
        alone, ours = rank["results"][name]["saved"]
        assert list(ours) == steps
        assert ours == alone


@pytest.mark.extended
@each_optimizer
def test_each_rank_holds_about_half_and_all_of_it_afterwards(ranks, name):
    shares = [rank["results"][name]["held_share"] for rank in ranks]
    assert max(shares) < 0.55
    assert sum(shares) == pytest.approx(1.0, abs=0.01)
    assert [rank["results"][name]["held_after"] for rank in ranks] == [1.0, 1.0]


@pytest.mark.extended
def test_copies_and_pickles_are_whole_and_a_checkpoint_can_be_loaded_meanwhile(ranks):
    for rank in ranks:
        alone, ours = rank["copies"]
        assert set(alone) == {"copied", "pickled", "weights", "state"}
        assert ours == alone


@pytest.mark.extended
def test_a_step_may_compute_its_loss_itself(ranks):
    for rank in ranks:
        alone, ours = rank["closure"]
        assert ours == alone


@pytest.mark.extended
def test_undone_while_a_rank_is_held_up_all_have_the_whole_state(ranks):
    for rank in ranks:
        alone, ours = rank["held up"]
        assert ours == alone


@pytest.mark.extended
def test_what_cannot_be_shared_is_refused_in_words(ranks):
    assert ranks[0]["refusals"] == {
        "none wrapped": "no model of the loop is wrapped in DistributedDataParallel",
        "no optimizer": "no optimizer has stepped",
        "no state": "SGD keeps no state here",
        "LBFGS": "LBFGS may look at several parameters at once, or keep its state elsewhere",
        "outside": "the optimizer has parameters that DistributedDataParallel does not average",
        "different": "weights or the optimizer's state are not the same on all ranks",
    }
    assert ranks[1]["refusals"]["different"] == ranks[0]["refusals"]["different"]


def test_a_state_travels_as_text_and_tensors():
    moment = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    share = [(3, {"step": torch.tensor(7.1), "moment": moment, "mu": 0.1, "none": None})]
    ((place, state),) = copied = made(described(share), torch.device("cpu"))
    for ours, theirs in zip(tensors(copied), tensors(share), strict=True):
        ours.copy_(theirs)
    assert place == 3
    assert list(state) == ["step", "moment", "mu", "none"]
    assert state["step"].equal(torch.tensor(7.1))
    assert state["moment"].equal(moment)
    assert state["moment"].stride() == moment.stride()
    assert (state["mu"], state["none"]) == (0.1, None)


def test_things_are_dealt_out_evenly():
    assert split([1, 8, 4, 4, 1], 2) == [0, 0, 1, 1, 1]
    assert split([5], 3) == [0]


def test_a_digest_tells_bits_apart():
    tensor = torch.tensor([0.0, 1.0])
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(torch.tensor([-0.0, 1.0]))
    assert digest(torch.complex(tensor, tensor)) != digest(torch.complex(tensor, 0 * tensor))


@pytest.mark.extended
def test_under_the_tuner_weights_and_checkpoints_are_those_of_the_script_alone(tmp_path):
    """The last one is asked for by one rank when the other's script has ended."""
    script = SCRIPTS / "zero_checkpoints.py"
    alone = train(tmp_path / "alone", "", steps=400, script=script)
    ours = train(tmp_path / "ours", APPLY, steps=400, script=script)
    assert (ours.codes, ours.lines) == (alone.codes, alone.lines)
    assert len(ours.lines[0].split()) == 5 + 9
    assert [each["outcome"] for each in ours.told("trial")] == ["kept"]
    assert not ours.told("confirmation"), "what is there for its memory is not taken away to be timed"
    for rank in (0, 1):
        assert not ours.told("tuning_error", rank) and not ours.told("frozen", rank)


@pytest.mark.extended
def test_a_rank_that_dies_takes_the_others_with_it_as_it_does_without_us(tmp_path):
    job = train(tmp_path, APPLY, wrong="dies")  # within its time
    assert job.codes[1] == -9
    assert job.codes[0] > 0
