"""A transformer under torch.compile, all shapes alike; `get_batch` slices one tensor."""

import torch
from torch import nn

torch.manual_seed(0)
text = torch.randint(64, (20_000,))


def get_batch(size=12, length=64):
    starts = torch.randint(len(text) - length - 1, (size, 1))
    index = starts + torch.arange(length)
    return text[index], text[index + 1]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 96)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(96, 64)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


decoder = Decoder()
compiled = torch.compile(decoder, backend="aot_eager")
optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3, fused=True)
for _ in range(140):  # the training loop
    x, y = get_batch()
    loss = nn.functional.cross_entropy(compiled(x).transpose(1, 2), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
