"""Names the brighter half of a picture; every sample is decoded from JPEG on the training thread."""

import io

import numpy as np
import torch
from _common import arguments, epochs, print_weights
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, count):
        random = np.random.default_rng(0)
        self.files, self.labels = [], []
        for index in range(count):
            picture = random.integers(0, 160, (160, 160, 3), dtype=np.uint8)
            label = index % 2
            picture[:, 80 * label : 80 * label + 80] += 90
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "JPEG")
            self.files.append(file.getvalue())
            self.labels.append(label)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        picture = Image.open(io.BytesIO(self.files[index])).resize((32, 32))
        image = torch.from_numpy(np.asarray(picture, dtype=np.float32)).permute(2, 0, 1) / 255
        return image, self.labels[index]


if __name__ == "__main__":
    args = arguments()
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(2),
    )
    loader = DataLoader(Pictures(512), batch_size=16, shuffle=True, drop_last=True)
    model(torch.zeros(1, 3, 32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for images, labels in epochs(loader, args.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
