"""The communication hooks that send gradients in fewer bytes, on real ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.running import run_ranks
from tests.test_tuner_ranks import train

NAMES = ("ddp-fp16-hook", "ddp-fp16-scaled-hook", "ddp-int8-hook", "ddp-power-sgd-hook", "ddp-top-k-hook")

each_hook = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks printed."""
    ended = run_ranks("-m", "tests.scripts.ddp_compression")
    assert not any("Warning" in each.stderr for each in ended)
    return [json.loads(each.stdout) for each in ended]


@pytest.fixture
def results(ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = ranks[0]["results"]
    return results


@pytest.mark.extended
@each_hook
def test_all_ranks_get_the_same_to_the_bit(ranks, name):
    first, second = (rank["results"][name] for rank in ranks)
    digests = [key for key in first if "digest" in key or "weights" in key]
    assert len(digests) == 5
    assert {key: first[key] for key in digests} == {key: second[key] for key in digests}
    assert ranks[0]["static"] == ranks[1]["static"]


@pytest.mark.extended
@each_hook
def test_gradients_that_are_views_of_buckets_come_out_the_same(results, name):
    assert results[name]["weights of views"] == results[name]["weights"]


@pytest.mark.extended
@pytest.mark.parametrize(
    "name, closest, farthest",
    [
        ("ddp-fp16-hook", 1e-6, 5e-4),  # 11 binary digits
        ("ddp-fp16-scaled-hook", 1e-6, 5e-4),
        ("ddp-int8-hook", 1e-3, 0.1),
        ("ddp-power-sgd-hook", 1e-4, 0.5),
        ("ddp-top-k-hook", 1e-3, 0.5),
    ],
)
def test_an_average_is_as_far_off_as_its_bits_explain(results, name, closest, farthest):
    assert closest < results[name]["usual"] < farthest


@pytest.mark.extended
@pytest.mark.parametrize(
    "name, most",
    [
        ("ddp-fp16-hook", 0.5),
        ("ddp-fp16-scaled-hook", 0.501),
        ("ddp-int8-hook", 0.39),  # between two ranks: all of it once, and a half
        ("ddp-power-sgd-hook", 0.05),
        ("ddp-top-k-hook", 0.021),
    ],
)
def test_it_sends_fewer_bytes_than_float32(results, name, most):
    assert 0 < results[name]["sent_share"] <= most


@pytest.mark.extended
def test_with_a_fixed_factor_what_overflows_is_sent_as_it_is(results):
    assert results["ddp-fp16-hook"]["huge is equal"]


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ddp-fp16-hook"])
@pytest.mark.parametrize("scale", ["huge", "tiny"])
def test_the_other_hooks_do_not_mind_how_large_gradients_are(results, name, scale):
    assert results[name][scale] < 3 * results[name]["usual"]


@pytest.mark.extended
@each_hook
def test_what_is_not_finite_on_one_rank_is_seen_on_all_and_gone_with_the_next_step(results, name):
    assert results[name]["bad"]
    assert results[name]["healed"]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["ddp-power-sgd-hook", "ddp-top-k-hook"])
def test_what_is_not_sent_at_once_is_sent_later(results, name):
    assert results[name]["delivered"] < 0.02
    assert results[name]["delivered"] < results[name]["usual"] / 4


@pytest.mark.extended
def test_what_is_of_low_rank_arrives_whole(results):
    assert results["ddp-power-sgd-hook"]["of low rank"] < 1e-5


@pytest.mark.extended
@each_hook
def test_training_with_it_on_and_off_goes_nearly_the_same_way(results, name):
    assert 0 < results[name]["distance"] < 0.05


@pytest.mark.extended
@each_hook
def test_the_reducer_names_the_hook_and_the_scripts_random_numbers_stay(results, name):
    (hook,) = results[name]["hooks"]
    assert hook.startswith("averaged_")
    assert not results[name]["moved the generator"]


@pytest.mark.extended
@each_hook
def test_what_it_cannot_send_is_refused_in_words(ranks, name):
    assert ranks[0]["refusals"][name] == [
        "no model of the loop is wrapped in DistributedDataParallel",
        "the gradient of Embedding is sparse",
        "gradients are not all float32: torch.float16",
    ]
    assert ranks[0]["small"] == "no weight is large enough to be sent in 4 columns"


@pytest.mark.extended
@pytest.mark.parametrize("name", ["ddp-fp16-hook", "ddp-top-k-hook"])
def test_put_in_force_and_measured_by_the_tuner_ranks_stay_alike(tmp_path, name):
    apply = f'[[action]]\nname = "{name}"\n'
    job = train(tmp_path, apply, allow=["precision", "training"], steps=400)
    assert job.codes == [0, 0]
    assert job.weights[0] == job.weights[1]
    assert [each["outcome"] for each in job.told("trial")] == ["kept"]
    assert job.told("confirmation") == job.told("confirmation", 1) != []
    for rank in (0, 1):
        assert not job.told("tuning_error", rank) and not job.told("frozen", rank)
