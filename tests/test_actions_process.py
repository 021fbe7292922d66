"""Actions on the process: threads, flags of the GPU's libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diagnose.actions.base import CannotApply
from diagnose.actions.cudnn_benchmark import CudnnBenchmark
from diagnose.actions.sdpa import CUDNN, CUDNN_FIRST, Sdpa
from diagnose.actions.set_threads import SetThreads, cpus
from diagnose.actions.tf32_matmul import Tf32Matmul
from diagnose.core.job import Job
from diagnose.hooks._recorder import Recorder
from diagnose.launch.tuning import LiveTuning
from tests.toggled import ConvNet, assert_close, images, train, tuned, weights


def run(action: Any, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with tuned(action, **options):
        train(model, optimizer, images())
    return weights(model)


# -- threads


def test_another_number_of_threads_trains_as_the_script_does_alone() -> None:
    other = torch.get_num_threads() + 1
    assert_close(run(SetThreads(), value=other), run(None))


def test_the_choices_are_one_half_and_all_save_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert SetThreads().values(Job()) == [1, 16]
    assert SetThreads().values(Job(local_ranks=4)) == [1, 2, 4]
    assert SetThreads().values(Job(facts={"quota_cpus": 6.5})) == [1, 3, 6]


def test_each_rank_has_at_least_one_cpu() -> None:
    assert cpus(Job(local_ranks=10_000)) == 1


def test_threads_are_guessed_at_only_where_eager_operations_run_on_a_cpu() -> None:
    SetThreads().check_unasked(Job(models=[ConvNet()]))
    with pytest.raises(CannotApply, match="on a device"):
        SetThreads().check_unasked(Job(models=[ConvNet()], device="cuda"))
    model = ConvNet()
    model.compile(backend="eager")
    with pytest.raises(CannotApply, match="compiles ConvNet itself"):
        SetThreads().check_unasked(Job(models=[model]))


def test_without_a_choice_threads_are_refused() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.raises(CannotApply, match="no choice"):
            SetThreads().check(Job(local_ranks=10_000))
    finally:
        torch.set_num_threads(threads)


# -- flags


@pytest.mark.parametrize(
    "action", [Tf32Matmul(), CudnnBenchmark(), Sdpa()], ids=lambda action: type(action).__name__
)
def test_without_a_gpu_its_flags_are_refused(action: Any) -> None:
    with pytest.raises(CannotApply):
        action.check(Job(models=[ConvNet()]))


def test_tf32_is_set_and_put_back() -> None:
    action, job = Tf32Matmul(), Job(device="cuda")
    before = action.state(job)
    with action.apply(job, None):
        assert torch.get_float32_matmul_precision() == "high"
        with pytest.raises(RuntimeError, match="was not undone"):
            action.verify_undone(job, before)
    action.verify_undone(job, before)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch is older than 2.9")
def test_after_tf32_products_follow_the_setting_for_all_again() -> None:
    """The older setting, put back, would say "ieee" for them."""
    with Tf32Matmul().apply(Job(device="cuda"), None):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "none"
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.backends.fp32_precision = "tf32"
    try:
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"


def test_tf32_is_refused_where_the_script_has_chosen() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(CannotApply, match="medium"), Tf32Matmul().apply(Job(), None):
            pass
    finally:
        torch.set_float32_matmul_precision("highest")


def test_cudnn_benchmark_is_refused_once_there_have_been_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for the algorithm that it has chosen for a shape before it looks at the flag."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    action = CudnnBenchmark()
    action.check(Job())
    with pytest.raises(CannotApply, match=r"keeps .*: put torch.backends.cudnn.benchmark = True before"):
        action.check(Job(models=[ConvNet()], device="cuda", steps=1))


def test_a_file_of_settings_sets_cudnn_benchmark_before_the_script_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    file = tmp_path / "tuned.toml"
    file.write_text('[[action]]\nname = "cudnn-benchmark"\n', encoding="utf-8")
    asked = {"allow": [], "only": [], "skip": [], "dry_run": False, "apply": str(file)}
    tuning = LiveTuning(Recorder(), tmp_path, asked)
    try:
        assert torch.backends.cudnn.benchmark
    finally:
        tuning.finish()
    assert not torch.backends.cudnn.benchmark


def test_cudnn_benchmark_is_set_and_put_back() -> None:
    action, job = CudnnBenchmark(), Job(device="cuda")
    before = action.state(job)
    with action.apply(job, None):
        assert torch.backends.cudnn.benchmark
    action.verify_undone(job, before)


def test_attention_kernels_that_the_script_has_forbidden_are_allowed_again() -> None:
    action, job = Sdpa(), Job()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert action.values(job) == [None]
        before, settings = action.state(job), action.settings(job, None)
        with action.apply(job, None):
            assert torch.backends.cuda.flash_sdp_enabled()
        action.verify_undone(job, before)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert settings == {"statement": "torch.backends.cuda.enable_flash_sdp(True)"}


def test_cudnn_can_be_asked_for_attention_first() -> None:
    action, job = Sdpa(), Job(device="cuda")
    before = action.state(job)
    with action.apply(job, CUDNN_FIRST):
        order = torch._C._get_sdp_priority_order()
        assert order[0] == CUDNN and sorted(order) == sorted(before[1])
    action.verify_undone(job, before)


def test_a_torch_without_a_private_name_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_sdp_priority_order")
    with pytest.raises(CannotApply, match="_get_sdp_priority_order"):
        Sdpa().check(Job(device="cuda"))
