"""The parts of a deep window: the trace is cut to size, and operations are counted."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diagnose.analysis.trace import read_trace
from diagnose.core.deep_window import WorkClass
from diagnose.launch.deep_window_count import Counting
from diagnose.launch.deep_window_file import pack


def test_a_trace_too_large_is_cut_after_an_event_and_stays_one(tmp_path: Path) -> None:
    whole = {
        "traceEvents": [
            {
                "ph": "X",
                "cat": "kernel",
                "name": f"k{zlib.crc32(bytes([i % 251, i // 251]))}",
                "ts": i,
                "dur": 1,
            }
            for i in range(3000)
        ]
    }
    source, target = tmp_path / "t.json", tmp_path / "t.json.gz"
    source.write_text(json.dumps(whole, indent=2).replace("    },", "  },").replace("    }\n", "  }\n"))
    assert pack(source, target) is False
    full = target.stat().st_size
    assert json.loads(gzip.decompress(target.read_bytes()))["traceEvents"][-1]["ts"] == 2999
    assert pack(source, target, max_bytes=full // 2) is True
    assert target.stat().st_size <= full // 2
    cut = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    assert 100 < len(cut) < 3000
    trace = read_trace(target)
    assert trace.num_kernels == len(cut) and not trace.damaged


def test_counting_passes_everything_on_and_stops_where_it_does_not_understand() -> None:
    mode = Counting(lambda: False, lambda name, inside: WorkClass.OTHER)
    with mode:
        product = torch.ones(3, 4) @ torch.ones(4, 5)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(3, 4) @ torch.ones(3, 4)
        mode._work_of = lambda name, inside: {}[name]  # type: ignore[assignment,misc,return-value]
        assert torch.equal(product + 0, product)
    assert mode.broken.startswith("aten.") and not mode.on
    assert sum(each["flops"] for each in mode.as_json()["work"]) == 2 * 3 * 4 * 5


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's operation is the example")
def test_counting_names_the_first_operation_whose_products_have_no_formula() -> None:
    mode = Counting(lambda: False, lambda name, inside: WorkClass.MATRIX)
    with mode:
        torch.nn.Linear(4, 4)(torch.ones(3, 4))
        assert mode.as_json()["unknown"] == ""
        torch.nn.LSTM(4, 4)(torch.ones(3, 2, 4))
    assert mode.as_json()["unknown"] == "aten::mkldnn_rnn_layer"


@pytest.mark.parametrize(
    "capability, hip, products, convolutions",
    [
        ([8, 0], False, "float32", "tf32"),
        ([7, 5], False, "float32", "float32"),
        ([9, 4], True, "float32", "float32"),
    ],
)
def test_float32_is_tf32_where_the_device_takes_it_for_products_of_that_kind(
    monkeypatch: pytest.MonkeyPatch, capability: list[int], hip: bool, products: str, convolutions: str
) -> None:
    settings = {"capability": capability, "hip": hip, "tf32": False, "cudnn_tf32": True}
    asked: list[int] = []

    def device_now(index: int) -> dict[str, Any]:
        asked.append(index)
        return settings

    monkeypatch.setattr("diagnose.launch.deep_window_count.device_now", device_now)
    convolve: Callable[..., Any] = torch.nn.functional.conv2d
    for call, shapes, told in (
        (torch.mm, ((8, 8), (8, 8)), products),
        (convolve, ((1, 3, 8, 8), (4, 3, 3, 3)), convolutions),
    ):
        mode = Counting(lambda: False, lambda name, inside: WorkClass.MATRIX)
        with FakeTensorMode():
            tensors = [torch.empty(shape, device="cuda:1") for shape in shapes]
            with mode:
                call(*tensors)
        assert (mode.as_json()["dtype"], mode.broken, asked.pop()) == (told, "", 1)


def test_a_mode_under_one_of_the_scripts_waits_for_it_to_go() -> None:
    ours, theirs = (Counting(lambda: False, lambda name, inside: WorkClass.OTHER) for _ in range(2))
    ours.__enter__()  # type: ignore[no-untyped-call]
    theirs.__enter__()  # type: ignore[no-untyped-call]
    assert not ours.leave()
    assert theirs.leave() and ours.leave() and not ours.leave()
