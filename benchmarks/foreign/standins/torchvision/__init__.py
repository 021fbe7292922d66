"""A stand-in for torchvision: what the scripts of pytorch/examples need of it, on data made on the spot.

The compatibility benchmark puts this folder on `PYTHONPATH` for those scripts alone, in both arms, so that
they run without a download and without a torchvision that matches the installed torch. Pictures are PIL
images, as torchvision's are; the number of them is cut to `STANDIN_PICTURES`.
"""

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
