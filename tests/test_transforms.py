"""What part of the workers' time passes in transforms."""

from __future__ import annotations

import pytest

from diagnose.analysis.transforms import transform_share
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame

FILE = "/home/u/data.py"
SOURCE = """
class Windows:
    def __getitem__(self, row):
        wave = self.decode(row)
        wave = self.transform(wave)
        return shifted(wave)


class Images:
    def __getitem__(self, row):
        return self.transform(self.decode(row)), self.labels[row]

    def crops(self, row):
        return [self.transform(self.decode(one)) for one in row]


class Sounds:
    def __getitem__(self, row):
        wave = self.decode(row)
        wave = self.resample(wave)
        return to_spectrogram(wave)

    def cut(self, row):
        return crop(noise(row))


class Shots:
    def __getitem__(self, row):
        path = resolved(path)
        raw = zlib.decompress(raw)
        image = self.shade(image)
        image = np.roll(image, 3)
        image = self.of(row, image)
        image = np.asarray(image)
        image = self.mosaic(image, self.load(7))
        return image

    def read(self, row):
        image = self.shade(image)
"""
NO_PACKAGE: Frame = ("", 0, "")
SECOND = 1_000_000_000


def share(
    *stacks: tuple[int, list[tuple[int, str]]], collates: tuple[str, ...] = (), package: Frame = NO_PACKAGE
) -> float | None:
    """Of stacks, innermost first, and the seconds that they were seen."""
    samples = [
        ((package, *((FILE, line, function) for line, function in stack)), seconds * SECOND)
        for seconds, stack in stacks
    ]
    return transform_share(samples, Sources({FILE: SOURCE}), collates)


GETS = "Windows.__getitem__"
ALL_IN_ONE = "Images.__getitem__"
CROPS = "Images.crops"
SOUNDS = "Sounds.__getitem__"
SHOTS = "Shots.__getitem__"


@pytest.mark.parametrize(
    "stack",
    [
        [(5, GETS)],
        [(60, "twitch"), (50, "Bursts.__call__"), (5, GETS)],
        [(70, "augment_wave"), (6, GETS)],
        [(80, "Crop.forward"), (5, GETS)],
        [(80, "Crop.forward"), (11, ALL_IN_ONE)],
        [(80, "Crop.forward"), (14, f"{CROPS}.<locals>.<listcomp>"), (14, CROPS)],
        [(20, SOUNDS)],
        [(90, "Sounds.resample"), (20, SOUNDS)],
        [(95, "to_spectrogram"), (21, SOUNDS)],
        [(99, "Shots.shade"), (31, SHOTS)],
        [(32, SHOTS)],
        [(97, "Shots.mosaic"), (35, SHOTS)],
    ],
)
def test_a_transform_is_called_as_an_object_or_by_such_a_name_and_has_all_that_it_calls(stack):
    assert share((1, [(4, GETS)]), (3, stack)) == 0.75


@pytest.mark.parametrize(
    "stack",
    [
        [(4, GETS)],
        [(90, "Windows.decode"), (4, GETS)],
        [(6, GETS)],
        [(7, "ImageReader.__call__"), (4, GETS)],
        [(90, "load_and_preprocess"), (4, GETS)],
        [(90, "Images.decode"), (11, ALL_IN_ONE)],
        [(90, "Images.decode"), (14, f"{CROPS}.<locals>.<listcomp>"), (14, CROPS)],
        [(11, ALL_IN_ONE)],
        [(19, SOUNDS)],
        [(70, "noise"), (24, "Sounds.cut")],
        [(71, "crop"), (24, "Sounds.cut")],
        [(72, "load_and_resize"), (19, SOUNDS)],
        [(98, "resolved"), (29, SHOTS)],
        [(30, SHOTS)],
        [(97, "Shots.of"), (33, SHOTS)],
        [(34, SHOTS)],
        [(35, SHOTS)],
        [(98, "Shots.load"), (35, SHOTS)],
        [(99, "Shots.shade"), (39, "Shots.read"), (33, SHOTS)],
    ],
)
def test_what_gets_a_sample_or_is_the_datasets_own_is_none(stack):
    assert share((1, stack)) == 0


@pytest.mark.parametrize(
    ("function", "expected"),
    [("ImageFile.load", 0.0), ("JpegImageFile.load_read", 0.0), ("Image.resize", 1.0)],
)
def test_what_decodes_an_opened_picture_in_its_first_transform_is_none(function: str, expected: float):
    package = ("/lib/site-packages/PIL/Image.py", 300, function)
    assert share((1, [(32, SHOTS)]), (1, [(80, "Crop.forward"), (5, GETS)]), package=package) == expected


def test_an_object_that_makes_batches_transforms_no_sample():
    assert share((1, [(9, "Pad.__call__")]), (1, [(5, GETS)]), collates=("Pad",)) == 0.5


def test_a_lambda_that_makes_batches_makes_no_other_lambda_one():
    own = "main.<locals>.<lambda>"
    assert share((1, [(40, own), (5, GETS)]), collates=(own,)) == 1


def test_few_samples_say_nothing():
    assert share() is None
