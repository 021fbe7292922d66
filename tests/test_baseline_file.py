"""The file that a history of jobs lies in, and the fingerprint that tells machines apart."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from diagnose.core.errors import DiagnoseError
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.gate.baseline import MOST_ENTRIES, Baseline, file_for, load, mismatch, save, soft_mismatch
from diagnose.gate.fingerprint import (
    Fingerprint,
    _arm_cores,
    differences,
    fingerprint_of,
    machine_facts,
    soft_facts,
)
from diagnose.gate.result import Metric
from diagnose.store.writer import Writer
from tests.gates import git, repository
from tests.test_baseline import PRINT, entry, history, with_phases

# -- the file


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / ".diagnose" / "baselines" / f"{PRINT.key}.json"
    save(history(), path)
    again = load(path)
    assert again.fingerprint == PRINT
    assert [each.metrics[Metric.STEP_MS] for each in again.entries] == [
        pytest.approx(each.metrics[Metric.STEP_MS], rel=1e-5) for each in history().entries
    ]
    assert file_for(path.parent, PRINT) == path == file_for(path, PRINT)
    path.rename(tmp_path / "mine")
    assert file_for(tmp_path / "mine", PRINT) == tmp_path / "mine", "a file by any name is one"


def test_phases_are_kept_and_a_file_without_them_is_read(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    save(Baseline(fingerprint=PRINT, entries=(with_phases(4.0),)), path)
    assert load(path).entries[0].phase_ms == with_phases(4.0).phase_ms
    data = json.loads(path.read_text())
    del data["entries"][0]["phase_ms"]
    path.write_text(json.dumps(data))
    assert load(path).entries[0].phase_ms == {}
    data["entries"][0]["phase_ms"] = {"forward": 4.0, "of a later version": 1.0}
    path.write_text(json.dumps(data))
    assert load(path).entries[0].phase_ms == {Phase.FORWARD: 4.0}


def test_a_history_of_a_version_that_knew_fewer_facts_goes_on(tmp_path: Path) -> None:
    save(history(), tmp_path / f"{PRINT.key}.json")
    now = replace(PRINT, hard={**PRINT.hard, "dtype": "float32"}, soft={**PRINT.soft, "threads": 4})
    assert now.key != PRINT.key
    path = file_for(tmp_path, now)
    assert path.name == f"{PRINT.key}.json"
    assert mismatch(load(path), now) == soft_mismatch(load(path), now) == ()
    save(replace(load(path), fingerprint=now), path)
    assert file_for(tmp_path, now) == path, "also once it knows them"
    other = replace(now, hard={**now.hard, "dtype": "bfloat16"})
    assert mismatch(load(path), other) == ("dtype: float32 then, bfloat16 now",)
    assert file_for(tmp_path, other) == tmp_path / f"{other.key}.json"


def test_only_the_last_thirty_jobs_are_kept() -> None:
    baseline = history(jobs=MOST_ENTRIES)
    longer = baseline.with_entry(entry(11))
    assert len(longer.entries) == MOST_ENTRIES
    assert longer.entries[-1] == entry(11)
    assert longer.entries[0] == baseline.entries[1]


def test_git_sees_the_baselines_and_nothing_else_of_ours(tmp_path: Path) -> None:
    repository(tmp_path, "print(1)")
    (tmp_path / ".diagnose" / "runs").mkdir(parents=True)
    (tmp_path / ".diagnose" / "runs" / "run.json").write_text("{}")
    (tmp_path / ".diagnose" / ".gitignore").write_text("*\n")  # as `diagnose run` leaves it
    save(history(), tmp_path / ".diagnose" / "baselines" / "abc.json")
    seen = git(tmp_path, "status", "--porcelain", "--untracked-files=all").split()[1::2]
    assert seen == [".diagnose/.gitignore", ".diagnose/baselines/abc.json"]
    ignores = tmp_path / ".diagnose" / ".gitignore"
    ignores.write_text(ignores.read_text() + "!/runs/kept/\n")
    before = ignores.read_text()
    save(history(), tmp_path / ".diagnose" / "baselines" / "abc.json")
    assert ignores.read_text() == before, "what the user lets git see stays"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": 1, "fingerprint": {}, "entries": [1]}', '{"schema": "x"}', "\udc80"],
)
def test_a_damaged_baseline_is_said_to_be_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DiagnoseError, match="is not a baseline"):
        load(path)


def test_a_figure_that_is_no_figure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    save(history(), path)
    for wrong in ("-1", "0", "NaN", "Infinity", '"fast"'):
        data = re.sub(r'"step_ms": [\d.]+', f'"step_ms": {wrong}', path.read_text(), count=1)
        (tmp_path / "c.json").write_text(data)
        with pytest.raises(DiagnoseError, match="is not a baseline"):
            load(tmp_path / "c.json")


def test_a_newer_baseline_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(DiagnoseError, match="newer diagnose"):
        load(path)


def test_what_a_newer_version_added_does_not_disturb(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    save(history(), path)
    path.write_text(path.read_text().replace('"step_ms"', '"new_metric": 1.5, "step_ms"'))
    assert len(load(path).entries) == 12


# -- the fingerprint


def test_the_key_depends_on_hard_facts_alone() -> None:
    assert PRINT.key == Fingerprint(hard=dict(reversed(PRINT.hard.items())), soft={"driver": "2"}).key
    assert PRINT.key != Fingerprint(hard={**PRINT.hard, "cpu": "B"}, soft=PRINT.soft).key
    assert re.fullmatch("[0-9a-f]{12}", PRINT.key)


def test_differences_are_said_in_words() -> None:
    assert differences(PRINT.hard, {"cpu": "B", "gpus": [], "cuda": "13.0"}) == (
        "cpu: A then, B now",
        "gpus: X + X then, none now",
        "cuda: none then, 13.0 now",
    )


def test_this_machine_is_described_without_importing_torch() -> None:
    facts = machine_facts()
    assert facts["cpu"] and facts["cpus"] >= 1
    assert re.fullmatch(r"\d+\.\d+", facts["torch"]), "patch releases are soft"
    assert machine_facts() == facts
    assert json.dumps(soft_facts())


ARM = """\
processor\t: {number}
BogoMIPS\t: 243.75
Features\t: fp asimd
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: {part}
CPU revision\t: 1
"""


def test_arm_machines_are_told_apart() -> None:
    def cores(*parts: str) -> str:
        return _arm_cores("\n".join(ARM.format(number=n, part=part) for n, part in enumerate(parts)))

    assert cores("0xd0c", "0xd0c") == "ARM 0x41 0x3 0xd0c"
    assert cores("0xd40", "0xd40") != cores("0xd0c", "0xd0c")
    assert cores("0xd40", "0xd0c") == "ARM 0x41 0x3 0xd0c + 0x41 0x3 0xd40"
    assert _arm_cores("processor\t: 0\nmodel name\t: AMD EPYC\n") == ""


def test_a_driver_that_does_not_count_its_devices_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", refuses)
    assert machine_facts()["gpus"] == []


def test_what_a_run_says_of_itself_is_in_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"models": [{"dtypes": {"float32": 4}}], "calls": {"autocast_dtype": "bfloat16"}}
    writer = Writer(tmp_path, 0)
    writer.set_meta(
        {"torch": "2.0.1+cu118", "python": "3.9.2", "num_threads": 3, "columns": COLUMNS, "state": {}}
    )
    writer.set_meta({"facts": facts})
    writer.add_steps([(1000,) + (0,) * (len(COLUMNS) - 1)])
    writer.close()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = fingerprint_of(tmp_path, ("train.py",))
    assert {name: found.hard[name] for name in ("torch", "cuda", "python", "dtype")} == {
        "torch": "2.0",
        "cuda": "11.8",
        "python": "3.9",
        "dtype": "float32, autocast bfloat16",
    }
    assert (found.soft["omp_num_threads"], found.soft["torch_threads"]) == ("3", 3)


@pytest.mark.parametrize(
    ("device", "names", "told"),
    [
        ("cuda", ["RTX 4090"], ["RTX 4090"]),
        ("cuda", ["RTX 4090", "RTX 3060"], ["RTX 3060", "RTX 4090"]),
        ("cuda", [""], None),
        ("cpu", ["RTX 4090"], None),
    ],
    ids=["one of several in the machine", "two", "without a name", "one that is left alone"],
)
def test_the_card_that_a_run_used_is_a_fact(
    tmp_path: Path, device: str, names: list[str], told: list[str] | None
) -> None:
    for rank, name in enumerate(names):
        writer = Writer(tmp_path, rank)
        writer.set_meta({"columns": COLUMNS, "state": {}, "rank": rank})
        writer.set_meta({"device": device, "device_name": name})
        writer.add_steps([(1000,) + (0,) * (len(COLUMNS) - 1)])
        writer.close()
    assert fingerprint_of(tmp_path, ("train.py",)).hard.get("gpu") == told


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([64, 64, 36] * 40, 64),
        ([64, 36] * 60, 64),
        ([36, 64] * 60, 64),
        (random.Random(1).choices(range(10, 90), k=120), "varies"),
        (random.Random(2).choices(range(10, 90), k=120), "varies"),
        ([], 0),
    ],
    ids=["a last smaller batch", "of two", "the other first", "of tokens", "of others", "no step"],
)
def test_the_batch_size_is_a_fact_only_where_there_is_one(
    tmp_path: Path, counts: list[int], told: int | str
) -> None:
    """A sampler that fills each batch with tokens has another median in each job."""
    writer = Writer(tmp_path, 0)
    writer.set_meta({"columns": COLUMNS, "state": {}})
    row = dict.fromkeys(COLUMNS, 0)
    writer.add_steps(
        [tuple((row | {"end_ns": n + 1, "samples": each}).values()) for n, each in enumerate(counts)]
    )
    writer.close()
    assert fingerprint_of(tmp_path, ("train.py",)).hard["samples_per_step"] == told
