"""The samples of a batch are counted, however it holds them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader

from diagnose.hooks._batch import MAX_LOOKS, batch_size
from diagnose.hooks._checksum import checksum
from diagnose.hooks._contents import contents_of
from diagnose.hooks._worker_readings import bytes_of, pieces_of, piped_bytes_of
from tests.fakes import FakeClock, measured


def images(index: int) -> Any:
    return torch.ones(3, 8, 8), {"boxes": torch.ones(index % 4, 4), "labels": torch.ones(index % 4)}


def masks(index: int) -> Any:
    return torch.ones(3, 8, 8), torch.ones(3, 8, 8)


def texts(index: int) -> Any:
    return torch.ones(20 + index, dtype=torch.long)


def labelled_texts(index: int) -> Any:
    return texts(index), index % 2


def rows(index: int) -> Any:
    return torch.ones(5), index


def alike_rows(index: int) -> Any:
    return torch.ones(5), torch.ones(5)


def views(index: int) -> Any:
    return (torch.ones(5), torch.ones(5)), index


def pairs(index: int) -> Any:
    return (torch.ones(5), torch.ones(5)), (index, index)


def named_views(index: int) -> Any:
    return (torch.ones(5), torch.ones(5)), f"{index}.png"


def transposed(samples: Any) -> Any:
    return tuple(zip(*samples, strict=True))


def as_they_are(samples: Any) -> Any:
    return samples


TELLING = [
    (rows, None),
    (alike_rows, None),
    (views, None),
    (pairs, None),
    (named_views, None),
    (images, transposed),
    (labelled_texts, transposed),
    (texts, as_they_are),
]


def counted(sample: Callable[[int], Any], collate_fn: Any, num_samples: int, asked: int) -> int:
    """Returns the samples that were counted of a loader's batches."""
    data = [sample(index) for index in range(num_samples)]
    with measured(FakeClock()) as recorder:
        for _ in DataLoader(data, batch_size=asked, collate_fn=collate_fn):
            pass
        assert not recorder.notes
        return recorder.samples


@pytest.mark.parametrize("asked", [2, 4, 8])
@pytest.mark.parametrize("sample, collate_fn", [*TELLING, (masks, transposed), (images, as_they_are)])
def test_samples_that_come_as_tensors_or_as_lists_are_counted(
    sample: Callable[[int], Any], collate_fn: Any, asked: int
):
    assert counted(sample, collate_fn, 40, asked) == 40


@pytest.mark.parametrize("sample, collate_fn", TELLING)
def test_the_samples_of_a_smaller_last_batch_are_counted(sample: Callable[[int], Any], collate_fn: Any):
    assert counted(sample, collate_fn, 38, 4) == 38
    assert counted(sample, collate_fn, 39, 4) == 39


def test_lists_of_samples_that_no_loader_made_are_counted():
    assert batch_size(transposed([images(index) for index in range(8)])) == (8, 0)
    assert batch_size(([torch.ones(8, 5), torch.ones(8, 5)], [torch.ones(8), torch.ones(8)])) == (8, 0)
    assert batch_size((torch.ones(8, 5), torch.ones(8))) == (8, 0)


@dataclass
class Batch:
    """What a `collate_fn` of the script's returns."""

    names: list[str]
    x: Any = None
    y: Any = None


def as_object(samples: Any) -> Batch:
    return Batch(["a name"], *torch.utils.data.default_collate(samples))


def test_the_samples_of_a_batch_that_is_an_object_of_a_dataclass_are_counted():
    assert counted(rows, as_object, 38, 4) == 38
    assert batch_size((Batch([], torch.ones(8, 20, dtype=torch.long)),)) == (8, 160)
    assert batch_size((Batch(["a setting"]), torch.ones(5, 3))) == (5, 0)
    assert batch_size(Batch) == (0, 0)


@dataclass
class Scaled:
    """A batch beside constants of its class, and with a field that is made when it is asked for."""

    MEAN: ClassVar[torch.Tensor] = torch.ones(3)
    scale: InitVar[torch.Tensor]
    image: Any = field(init=False)
    x: Any = None

    def __post_init__(self, scale: torch.Tensor) -> None:
        pass


def _decoded(_: Scaled) -> torch.Tensor:
    raise AssertionError("decoded in a hook")


Scaled.scale = torch.ones(4)
Scaled.image = property(_decoded)


@dataclass(slots=True)
class Slotted:
    """A batch without a dictionary."""

    name: str
    x: Any = None


def test_of_an_object_only_what_it_holds_itself_is_looked_at():
    x = torch.rand(8, 5)
    assert batch_size(Scaled(torch.ones(4), x)) == (8, 0)
    assert contents_of(Scaled(torch.ones(4), x)) == contents_of(x)
    assert batch_size(Slotted("a name", x)) == (8, 0)
    assert batch_size(Slotted.__new__(Slotted)) == (0, 0)


class Graphs:
    """A batch of graphs, as an object of a class of the script's own."""

    def __init__(self, nodes: Any, edges: Any) -> None:
        self.names, self.nodes, self.edges = ["a name"], nodes, edges


class Stored:
    """A batch that keeps its tensors in a mapping."""

    def __init__(self, **tensors: Any) -> None:
        self.store = tensors


def test_the_samples_that_an_object_of_any_class_holds_are_counted_where_nothing_else_is():
    nodes, edges = torch.rand(30, 4), torch.zeros(2, 90, dtype=torch.long)
    for batch in (Graphs(nodes, edges), Stored(name="a name", x=nodes)):
        assert batch_size(batch) == (30, 0)
        assert batch_size((batch, True)) == (30, 0)
        assert batch_size({"batch": batch}) == (30, 0)
        assert batch_size((batch, torch.ones(5, 3))) == (5, 0)
    assert batch_size((torch.nn.Linear(3, 4), Graphs(torch.nn.Parameter(nodes), None), torch)) == (0, 0)


class Counting(list[Any]):
    """Counts which of its elements are looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.looked_at += 1
            yield each


def test_of_many_samples_without_a_tensor_the_first_few_are_looked_at():
    samples = Counting(Batch(["a name"], 3, "a label") for _ in range(256))
    assert batch_size(samples) == (0, 0)
    assert 0 < samples.looked_at < 40


def test_what_else_such_a_batch_holds_tells_it_from_another_one():
    x, y = torch.rand(8, 20), torch.rand(8)
    looks = [contents_of((Batch([], x, other),)) for other in (y, y.clone(), y + 1)]
    assert looks[0] == looks[1] != looks[2]


class Lazy(Mapping[str, Any]):
    """A batch that loads what it is asked for."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("it is loaded")

    def __iter__(self) -> Iterator[str]:
        return iter(("x",))

    def __len__(self) -> int:
        return 1


class Computed(dict[str, Any]):
    """Likewise, and holds what is to be loaded."""

    def get(self, key: str, default: Any = None) -> Any:
        raise AssertionError("it is loaded")

    def values(self) -> Any:
        raise AssertionError("it is loaded")


class Answering:
    """Loads whatever attribute it is asked for."""

    __slots__ = ("x",)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is loaded")


@pytest.mark.parametrize("make", [Lazy, partial(Computed, x="a.png"), Answering])
def test_nothing_is_loaded_to_count_samples(make: Callable[[], Any]):
    batch = make()
    for given in (batch, (batch,), {"batch": batch}, [batch] * 2):
        assert batch_size(given, 2) == (0, 0)
    assert pieces_of(batch) == 1 + isinstance(batch, dict)
    assert bytes_of(batch) == piped_bytes_of(batch) == 5 * isinstance(batch, dict)
    checksum(batch)


class Tensors(Lazy):
    """A mapping that keeps its tensors in a dictionary, as those of libraries do."""

    def __init__(self, **tensors: Any) -> None:
        self.tensors = tensors


def test_a_mapping_of_a_librarys_own_is_looked_into_where_it_keeps_its_tensors():
    ids = torch.zeros(4, 6, dtype=torch.long)
    assert batch_size(Tensors(mask=torch.zeros(2), input_ids=ids)) == (4, 24)
    assert batch_size(UserDict(x=torch.zeros(4, 6))) == (4, 0)
    assert checksum(Tensors(x=torch.zeros(2))) != checksum(Tensors(x=torch.ones(2)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_samples_of_different_length_in_a_tensor_are_counted(layout: torch.layout):
    for dtype, tokens in ((torch.float32, 0), (torch.int64, 5)):
        rows = [torch.zeros(2, dtype=dtype), torch.zeros(3, dtype=dtype)]
        batch = torch.nested.nested_tensor(rows, layout=layout)
        assert batch_size(batch) == batch_size((batch, 1), 2) == (2, tokens)
        assert pieces_of(batch) == 1


def test_of_a_batch_of_many_parts_without_a_tensor_the_first_are_looked_at():
    nothing = SimpleNamespace()
    many = {number: Counting([nothing] * 40) for number in range(200)}
    assert batch_size(many) == (0, 0)
    assert sum(each.looked_at for each in many.values()) <= MAX_LOOKS
