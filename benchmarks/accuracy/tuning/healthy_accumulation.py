"""Four micro-batches to an optimizer step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
data = TensorDataset(torch.randn(2048, 300), torch.randint(5, (2048,)))
loader = DataLoader(data, batch_size=None, sampler=torch.randperm(2048).split(128))
for _ in range(30):
    for micro, (x, y) in enumerate(loader):  # the training loop
        loss = nn.functional.cross_entropy(model(x), y) / 4
        loss.backward()
        if micro % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
