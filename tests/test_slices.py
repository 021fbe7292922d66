"""Statements of a loop that take a tensor apart, and those that only look like it."""

from __future__ import annotations

import ast

import pytest

from diagnose.source.place import by_line
from diagnose.source.slices import takes_slices
from diagnose.source.statements import nodes_of


@pytest.mark.parametrize(
    ("statement", "takes"),
    [
        ("(x[:, i] - 0.5) / 0.25", True),
        ("out.append(torch.relu(x[:, i]))", True),
        ("means[:, i] = x[:, i].mean()", True),
        ("depth, *flow = x[group == i].sum(0)", True),
        # A sum of all turns.
        ("total += x[:, i]", True),
        ("total = total + x[:, i]", True),
        # One turn needs the one before, or calls what may be a layer.
        ("h = torch.tanh(h + x[:, i])", False),
        ("total *= x[:, i]", False),
        ("total = total + total * x[:, i]", False),
        ("out.append(self.cell(x[:, i]))", False),
        ("out.append(cell(x[:, i]))", False),
        ("out.append(self.cells[i](x[:, i]))", False),
        # No slice of a tensor, or always the same.
        ("h = layers[i]", False),
        ("y = x[:, 0] * 2", False),
        ("y = x[group == 0] * 2", False),
    ],
)
def test_slices_are_taken_where_one_operation_could_do_all_turns(statement: str, takes: bool):
    loop = ast.parse(f"for i in range(9):\n    {statement}").body[0]
    assert isinstance(loop, ast.For)
    inner = loop.body[0]
    assert takes_slices(inner, (loop,), list(ast.walk(inner))) is takes


def told(text: str) -> list[str]:
    """The statements of a text that take slices, each as text."""
    found: list[str] = []
    for places in by_line(ast.parse(text)).values():
        for place in places:
            nodes = nodes_of(place.statement)
            if takes_slices(place.statement, place.loops, nodes, place.function):
                found.append(ast.unparse(place.statement))
    return found


@pytest.mark.parametrize(
    "loop",
    [
        "for part in x.unbind(1):",
        "for i, part in enumerate(x.chunk(self.groups, 1)):",
        "for part, other in zip(x.unbind(1), torch.chunk(y, n, 1)):",
        "for part in x.split(1, dim=1):",
        "for i in range(9):\n    part = x[:, i]",
    ],
)
def test_what_a_turn_makes_of_its_slice_is_a_slice_too(loop: str):
    rest = "    mean = part.mean(-1)\n    total = total + mean\n    outs.append((part - mean).exp())\n"
    found = told(f"{loop}\n{rest}")
    assert [text for text in found if text in rest] == [
        "mean = part.mean(-1)",
        "total = total + mean",
        "outs.append((part - mean).exp())",
    ]


@pytest.mark.parametrize(
    "text",
    [
        # One turn needs the one before, whichever of its lines carries it on.
        "for part in x.unbind(1):\n    mixed = state * part\n    state = mixed.tanh()",
        "for t in range(9):\n    new = torch.logsumexp(a[:, None] + moves, 1) + x[:, t]\n    a = new",
        "for part in x.unbind(1):\n    level = level + part.exp()\n    outs.append(level * 2)",
        # What a layer has made is no slice, and a few large parts are not many small ones.
        "for part in x.unbind(1):\n    z = self.layer(part)\n    outs.append(z.relu())",
        "for part in qkv.chunk(3, -1):\n    outs.append(part.relu())",
        "for rows in x.split(64):\n    outs.append(rows.relu())",
        "for layer in self.layers:\n    outs.append(x * layer.weight)",
        # The turns are the steps of the training.
        "for rows in x.unbind(0):\n    loss = rows.pow(2).sum()\n    loss.backward()",
    ],
)
def test_a_carried_state_a_layer_or_a_step_is_no_slice(text: str):
    body = text.split("\n    ", 1)[1]
    sums = ["level = level + part.exp()"]
    assert [each for each in told(text) if each in body and each not in sums] == []


ROWS = "def forward(self, x, lengths):\n    b, t = x.shape[:2]\n"


@pytest.mark.parametrize(
    "turns",
    [
        "    x = torch.stack([(row - row.mean()) / (row.std() + 1e-6) for row in x])",
        "    for i, row in enumerate(x):\n        outs[i] = row.log1p() - row.amax()",
        "    return torch.stack([row.softmax(-1) * n for row, n in zip(x, lengths)])",
    ],
)
def test_a_row_of_what_is_asked_for_its_shape_is_a_slice(turns: str):
    (found,) = told(ROWS + turns)
    assert found in ast.unparse(ast.parse(ROWS + turns))
    assert not told(turns.replace("    ", "", 1)), "nobody says that x is a tensor"


@pytest.mark.parametrize(
    "turns",
    [
        # A list, or what has become one; and what the function was not given may be three large parts.
        "    y = [part.relu() for part in self.parts]",
        "    x = list(x.split(64))\n    y = [part.relu() for part in x]",
        "    qkv = self.qkv(x)\n    parts = qkv.shape\n    y = [part.relu() for part in qkv]",
        # A function of the script's, a part that differs from row to row, what no operation does for all.
        "    y = [self.augment(row) for row in x]",
        "    y = [crop(row) for row in x]",
        "    y = [row[:n].mean() for row, n in zip(x, lengths)]",
        "    y = [row.unique() for row in x]",
        # One turn needs the one before.
        "    for row in x:\n        h = torch.tanh(h + row)",
    ],
)
def test_a_list_a_function_and_a_part_that_differs_are_no_rows(turns: str):
    assert told(ROWS + turns) == []


@pytest.mark.parametrize(
    "text",
    [
        """
def prepare(self, images):
    if isinstance(images, torch.Tensor):
        return (images.float() - self.mean) / self.std, images.shape[-2:]
    return [(image.float() - self.mean) / self.std for image in images]
""",
        """
def scale(images):
    if torch.is_tensor(images):
        return images.float() / images.size(0)
    return [image.float() / 255 for image in images]
""",
        """
def areas(boxes):
    device = boxes.device
    return torch.stack([box.prod() for box in boxes])
""",
        """
def areas(boxes):
    width, height = boxes.size
    return torch.stack([box.prod() for box in boxes])
""",
        """
def loss(z):
    b = z.shape[1]
    a, b = [v / v.norm(dim=1, keepdim=True) for v in z]
    return (a * b).sum()
""",
    ],
)
def test_what_may_be_a_list_or_has_two_rows_is_left_alone(text: str):
    assert told(text) == []


def test_a_row_for_each_turn_that_is_put_together_again_is_a_slice_whatever_takes_it():
    assert (
        len(told("def f(x):\n    n = x.size(0)\n    return torch.stack([row / row.norm() for row in x])"))
        == 1
    )
    for turns in (
        "    x, n = torch.stack([row / row.norm() for row in x]), 0",
        "    first, *rest = [row / row.norm() for row in x]",
    ):
        assert len(told(ROWS + turns)) == 1
