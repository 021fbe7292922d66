"""A list of batches, made beforehand; gradient norms are logged now and then."""

import torch
from torch import nn

torch.manual_seed(0)
batches = [(torch.rand(8, 1, 40, 40), torch.randint(2, (8,))) for _ in range(20)]
model = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2),
    nn.ReLU(),
    nn.Conv2d(16, 16, 5, padding=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(25600, 2),
)
momentum = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
for epoch in range(7):
    for number, (image, kind) in enumerate(batches):  # the training loop
        loss = nn.CrossEntropyLoss()(model(image), kind)
        momentum.zero_grad()
        loss.backward()
        momentum.step()
        if number == 0:
            print(epoch, loss.item(), model[0].weight.grad.norm().item())
