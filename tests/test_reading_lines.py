"""Lines of a data set that read, in other ways than by a file that `with` keeps open."""

from __future__ import annotations

import ast
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import diagnose
from diagnose.analysis.reading import lines_that_read, reading_shares
from diagnose.rules._own_loading import MOSTLY
from diagnose.source.sources import Sources

READ = """
state = pickle.load(file)
shape = joblib.load(path)
row = self.db.execute("SELECT wave FROM waves WHERE number = ?", (number,)).fetchone()
rows = cursor.fetchmany(16)
base = sqlite3.connect(path)
text = linecache.getline(path, number)
with h5py.File(path) as file:
    wave = file["wave"][number]
with zipfile.ZipFile(path) as archive:
    names = archive.namelist()
raw = archive.extractfile(name)
rows = self.conn.cursor().execute(query, (number,))
archive = tarfile.TarFile(path, mode="r")
answer = urllib.request.urlopen(address).read()
raw = self.server.recv(4096)
member = archive.getmember(name)
with tarfile.open(path) as archive:
    raw = archive.extractfile(name).read()
os.preadv(self.file, [self.page], number * 65536)
"""
MADE = """
with h5py.File(path, "w") as file:
    file["wave"] = wave
plan.executed(wave)
state = self.load(path)
table = json.load(file)
wave = pickle.loads(raw)
image = self.pipeline.execute(image)
wave = plan.execute(wave)
db.execute("INSERT INTO waves VALUES (?, ?)", (number, wave))
with zipfile.ZipFile(path, "a") as archive:
    archive.writestr(name, wave)
with tarfile.TarFile(path, mode="w") as archive:
    archive.add(name)
"""


def test_stores_of_other_kinds_are_read_too():
    assert lines_that_read(ast.parse(READ)).reading == set(range(2, 21))


ASKED = """
rows = self.db.execute("SELECT wave FROM waves WHERE number = ?", (number,)).fetchall()
wave = np.frombuffer(connection.execute(query).fetchone()[0], np.float32)
with zipfile.ZipFile(path) as archive:
    image = decoded(archive.read(name))
with tarfile.open(path) as archive:
    raw = archive.extractfile(name).read()
for number, value in cursor.execute(query):
    total += weighed(value)
match cursor.fetchone():
    case (number, value):
        total += weighed(value)
"""
TAKEN_APART = """
image = decoded(connection.execute(query).fetchone()[0])
with open(path) as file:
    text = file.read()
state = np.load(path)
"""


def test_a_line_that_only_asks_a_store_is_told_from_one_that_takes_apart_what_it_gets():
    assert lines_that_read(ast.parse(ASKED)).asking == {2, 3, 4, 6, 7, 8, 10}
    assert lines_that_read(ast.parse(TAKEN_APART)).asking == frozenset()


def test_what_a_package_does_in_a_line_that_asks_a_store_is_not_asking():
    file, second = "/home/u/data.py", 1_000_000_000
    stack = (file, 2, "get"), ("/home/u/train.py", 3, "main")
    stacks = [((("", 0, ""), *stack), second), ((("/site-packages/a/b.py", 9, "f"), *stack), second)]
    shares = reading_shares(stacks, Sources({file: ASKED}))
    assert (shares.reading, shares.asking) == (1.0, 0.5)


def test_what_is_written_or_taken_apart_in_memory_is_not_read():
    assert lines_that_read(ast.parse(MADE)).reading == frozenset()


class Pickled(Dataset[Any]):
    """Rows of which each part lies in a file of its own, which no `with` closes."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{part}.pkl" for part in range(64)]
        for path in self.paths:
            path.write_bytes(pickle.dumps([0.5] * 40))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        total = float(index)
        for path in self.paths:
            file = open(path, "rb")  # noqa: SIM115 (as many do)
            part = pickle.load(file)
            file.close()
            total += part[0]
        return torch.full((4,), total)


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="lines are sampled on Linux alone")
def test_a_run_that_unpickles_small_files_reads_most_of_its_loading(tmp_path: Path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    (tmp_path / "files").mkdir()
    loader = DataLoader(Pickled(tmp_path / "files"), batch_size=8)
    diagnose.attach(tmp_path / "run")
    try:
        for _ in range(20):
            for rows in loader:
                model(rows).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        own = diagnose.detach().input.own
    assert own is not None and own.reading_share is not None
    assert own.reading_share >= MOSTLY
