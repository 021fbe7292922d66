"""The sets of parameters that `optimizers.py` steps: by name, the shape of each tensor."""

from __future__ import annotations

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """161 tensors, 25.6 million elements."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, side in ((width, channels, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, side, side), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2() -> list[Shape]:
    """148 tensors, 124 million elements."""
    width = 768
    layer: list[Shape] = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *layer * 12, (width,), (width,)]


def llama_1b() -> list[Shape]:
    """146 tensors, 1.24 billion elements."""
    width, inner, keys = 2048, 8192, 512
    attention: list[Shape] = [(width, width), (keys, width), (keys, width), (width, width)]
    layer = [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(128256, width), *layer * 16, (width,)]


def llama_7b_shard() -> list[Shape]:
    """291 tensors, 842 million elements: what one of 8 ranks holds."""
    width, inner, ranks = 4096, 11008, 8
    square, long, short = (width * width // ranks,), (width * inner // ranks,), (width // ranks,)
    layer: list[Shape] = [square] * 4 + [long] * 3 + [short] * 2
    return [(32000 * width // ranks,)] * 2 + layer * 32 + [short]


SHAPES: dict[str, list[Shape]] = {
    "ResNet-50": resnet50(),
    "GPT-2": gpt2(),
    "Llama-1B": llama_1b(),
    "Llama-7B/8": llama_7b_shard(),
    "10 x 16.8 M": [(4096, 4096)] * 10,
    "1000 x 1024": [(1024,)] * 1000,
    "10000 x 64": [(64,)] * 10000,
    "tiny": [(40, 17), (1,), (3,), (1023,), (4097,), (5, 700), (64, 64)],
}
"""`tiny` is for checks of correctness, and for `--dry-run`: odd sizes, small tensors and large ones, and
one of those that others keep in 8 bits."""
