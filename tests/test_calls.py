"""Calls that stand on a line of a script, as it is, and given other arguments."""

from __future__ import annotations

import pytest

from diagnose.source.calls import call_at, with_arguments
from diagnose.source.sources import Sources


def source(text: str) -> Sources:
    return Sources({"train.py": text})


def test_a_call_over_several_lines_is_found_from_any_of_them():
    text = "import torch\nloader = torch.utils.data.DataLoader(\n    rows,  # all of them\n    32,\n)\n"
    for line in (2, 3, 5):
        assert (
            call_at(source(text), "train.py", line, "DataLoader") == "torch.utils.data.DataLoader(rows, 32)"
        )


def test_a_call_under_the_name_that_it_was_imported_as_is_found():
    text = "from torch.utils.data import DataLoader as Loader\nloader = Loader(rows)\n"
    assert call_at(source(text), "train.py", 2, "DataLoader") == "Loader(rows)"


@pytest.mark.parametrize(
    ("file", "line", "text"),
    [
        ("train.py", 1, "trainer.train()\n"),
        ("train.py", 2, "loader = DataLoader(rows)\n"),
        ("train.py", 1, "not python ("),
        ("", 0, ""),
    ],
)
def test_where_no_such_call_stands_there_is_none(file, line, text):
    assert call_at(source(text), file, line, "DataLoader") == ""


@pytest.mark.parametrize(
    ("call", "arguments", "changed"),
    [
        ("DataLoader(rows, 32)", {"num_workers": 4}, "DataLoader(rows, 32, num_workers=4)"),
        ("DataLoader(rows, num_workers=args.j)", {"num_workers": 4}, "DataLoader(rows, num_workers=4)"),
        ("DataLoader(rows, in_order=True)", {"in_order": None}, "DataLoader(rows)"),
        (
            "DataLoader(rows, 32, True, None, None, 2)",
            {"num_workers": 4},
            "DataLoader(rows, 32, True, None, None, num_workers=4)",
        ),
        (
            "DataLoader(rows, 32, True, None, None, 0, pad, False)",
            {"num_workers": 4, "pin_memory": True},
            "DataLoader(rows, 32, True, None, None, num_workers=4, collate_fn=pad, pin_memory=True)",
        ),
        ("DataLoader(*given)", {"num_workers": 4}, "DataLoader(..., num_workers=4)"),
        ("DataLoader(rows, *rest)", {"batch_size": 4}, "DataLoader(..., batch_size=4)"),
        (
            "AdamW(model.parameters(), lr=1e-3)",
            {"fused": True},
            "AdamW(model.parameters(), lr=0.001, fused=True)",
        ),
        ("", {"num_workers": 2}, "DataLoader(..., num_workers=2)"),
        (
            "DataLoader(rows, **options, pin_memory=True)",
            {"num_workers": 2, "pin_memory": False},
            "DataLoader(rows, pin_memory=False, **{**options, 'num_workers': 2})",
        ),
        (
            "DataLoader(rows, **options, num_workers=1)",
            {"num_workers": 2},
            "DataLoader(rows, **options, num_workers=2)",
        ),
        (
            "DataLoader(**data, **options)",
            {"num_workers": 2, "persistent_workers": True},
            "DataLoader(**{**data, **options, 'num_workers': 2, 'persistent_workers': True})",
        ),
        (
            "DataLoader(rows, **options)",
            {"num_workers": 0, "prefetch_factor": None},
            "DataLoader(..., num_workers=0)",
        ),
    ],
)
def test_a_call_is_given_other_arguments(call, arguments, changed):
    assert with_arguments(call, "DataLoader", **arguments) == changed
