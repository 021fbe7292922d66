"""Two ranks with equal work, and much of it to each gradient."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128 * 20, 96), torch.randint(6, (128 * 20,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, sampler=torch.utils.data.BatchSampler(sampler, 128, True), batch_size=None)
    net = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU(), torch.nn.Linear(96, 6))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in loader:  # the training loop
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(x.repeat(16, 1)), y.repeat(16)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
