"""A small dataset whose samples are prepared dearly, and in the same way, in each of many epochs."""

import torch
from _common import arguments, epochs, print_weights
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Spectra(Dataset):
    def __init__(self):
        self.waves = torch.randn(256, 8192, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        spectrum = torch.stft(
            self.waves[index], 512, 64, window=torch.hann_window(512), return_complex=True
        )
        power = spectrum.abs().square().mean(dim=1)
        return power.log1p(), power.argmax() % 4


if __name__ == "__main__":
    args = arguments()
    model = nn.Sequential(nn.Linear(257, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for spectra, labels in epochs(DataLoader(Spectra(), batch_size=16, shuffle=True), args.steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(spectra), labels)
        loss.backward()
        optimizer.step()
    print_weights(model, loss)
