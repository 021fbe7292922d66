"""Two ranks that step after four micro-batches, and exchange all gradients after each of them."""

import torch
import torch.distributed as dist
from _common import arguments, print_weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if __name__ == "__main__":
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = torch.randn(4096, 64)
    model = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data = TensorDataset(rows)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    steps = micro_batches = 0
    while steps < args.steps:
        for (batch,) in loader:
            loss = (ddp(batch).squeeze(1) - batch.sum(dim=1)).square().mean() / 4
            loss.backward()
            micro_batches += 1
            if micro_batches % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if steps == args.steps:
                    break
    if dist.get_rank() == 0:
        print_weights(model, loss)
    dist.destroy_process_group()
