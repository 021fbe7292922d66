# Which fish live together?  Node labels on a graph of reefs; message passing by a sparse matrix, full batch.  # noqa: E501
import argparse

import torch
import torch.nn.functional as F
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=200)
args = ap.parse_args()
torch.manual_seed(2)

N, DEG, FEATS, HID, CLASSES = 1400, 8, 96, 160, 6
truth = torch.randint(CLASSES, (N,))
x = torch.randn(N, FEATS)
x[:, :CLASSES] += 1.5 * F.one_hot(truth, CLASSES)
src = torch.arange(N).repeat_interleave(DEG)
dst = torch.randint(N, (N * DEG,))
both = torch.cat([torch.stack([src, dst]), torch.stack([dst, src]), torch.arange(N).expand(2, N)], 1)
adj = torch.sparse_coo_tensor(both, torch.ones(both.shape[1]), (N, N)).coalesce()
deg = torch.sparse.sum(adj, 1).to_dense().rsqrt()
i, j = adj.indices()
A = torch.sparse_coo_tensor(adj.indices(), adj.values() * deg[i] * deg[j], (N, N), is_coalesced=True)
train = torch.rand(N) < 0.7
rows, held = train.nonzero()[:, 0], (~train).nonzero()[:, 0]
A_x = torch.sparse.mm(A, x)  # the first hop never changes


class ReefNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(FEATS, HID), nn.Linear(HID, HID), nn.Linear(HID, CLASSES)
        self.skip = nn.Linear(FEATS, HID)

    def forward(self, hop):
        h = F.dropout(F.relu(self.one(hop)), 0.3, self.training)
        h = F.relu(torch.sparse.mm(A, self.two(h)) + self.skip(x))
        return self.out(F.dropout(h, 0.3, self.training))


net = ReefNet()
opt = torch.optim.AdamW(
    [
        {"params": net.out.parameters(), "weight_decay": 0.0},
        {"params": [p for n, p in net.named_parameters() if not n.startswith("out")]},
    ],
    lr=5e-3,
    fused=True,
)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=args.steps + 1)
best = 0.0
for epoch in range(args.steps):  # the training loop
    out = net(A_x)
    loss = F.cross_entropy(out[rows], truth[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if epoch % 40 == 39:
        net.eval()
        with torch.inference_mode():
            acc = (net(A_x)[held].argmax(1) == truth[held]).float().mean().item()
        net.train()
        best = max(best, acc)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, held out {acc:.3f} (best {best:.3f})")
