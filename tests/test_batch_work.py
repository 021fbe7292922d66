"""Which code of the loop works on a batch in hand, and which gets or reads it."""

from __future__ import annotations

import pytest

from tests.sampled_script import AFTER_OPTIMIZER, Script

FILTERS = Script(
    """
    def smoothed(x):
        return pool(x)

    def load_files(names):
        return parse(names)

    def pictures(names):
        return stack([tensor(Image.open(name)) for name in names])

    def train(batches, order, disk):
        for step in range(100):
            x, y = next(batches)
            x = smoothed(x)
            z = load_files(y)
            rows = order[step : step + 9]
            w = noise(rows)
            p = pictures(y)
            q = [cv2.imread(each) for each in y]
            r = disk[y]
            s = prepared(disk[y])
            t = (y - 3) / 255
            u = y[y > 3]
            loss = criterion(model(x, z, w, p, q, r, s, t, u), y)
            loss.backward()
    """,
    [("criterion(model", "forward"), ("loss.backward", "backward")],
)


@pytest.mark.parametrize(
    ("stack", "works"),
    [
        (("return pool", "x = smoothed"), True),
        (("x, y = next",), False),
        (("return parse", "z = load_files"), False),
        (("w = noise",), False),
        (("return stack", "p = pictures"), False),  # opens files
        (("return pool", "p = pictures"), True),
        (("q = [",), False),
        (("r = disk",), False),  # which may be read there
        (("s = prepared",), False),
        (("t = (y",), True),
        (("u = y",), True),
        (("loss.backward",), False),
    ],
)
def test_what_is_computed_of_a_batch_in_hand_is_work_and_what_gets_or_reads_it_is_not(stack, works):
    found = FILTERS.roles.works_on_batch(FILTERS.stack(*stack), AFTER_OPTIMIZER)
    assert found is works


UNPACKS = Script(
    """
    def numbers(blob):
        return array(zlib.decompress(blob))

    def augment(x):
        return pool(x)

    def parse_batch(self, batch):
        x = crop(batch)
        return x

    def train(blobs):
        for blob in blobs:
            x, y = unpack(blob)
            z = numbers(blob)
            x = smoothed(x)
            u, v = augment(*unpack(blob))
            v = reader_noise(v)
            w = self.parse_batch(blob)
            loss = criterion(model(x, z, u, v, w), y)
            loss.backward()
    """,
    [("criterion(model", "forward"), ("loss.backward", "backward")],
)


@pytest.mark.parametrize(
    ("stack", "works"),
    [
        (("x, y = unpack",), False),
        (("return array", "z = numbers"), False),
        (("x = smoothed",), True),
        (("return pool", "u, v = augment"), True),
        (("v = reader_noise",), True),
        (("w = self.parse_batch",), True),
        (("x = crop", "w = self.parse_batch"), True),
    ],
)
def test_what_makes_a_batch_of_the_bytes_that_a_reader_gave_gets_it(stack, works):
    assert UNPACKS.roles.works_on_batch(UNPACKS.stack(*stack), AFTER_OPTIMIZER) is works
