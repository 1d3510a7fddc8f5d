"""The torch side: torch.compile, SDPA, fused AdamW, float32 masters under bfloat16 autocast."""

import json
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from shapes import HEAD, SEQUENCE, SHAPES, VOCABULARY
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x.float(), (x.shape[-1],), self.scale, 1e-5).to(torch.bfloat16)


def turn(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.norm, self.mlp_norm = Norm(s.width), Norm(s.width)
        self.q = nn.Linear(s.width, s.heads * HEAD, bias=False)
        self.k = nn.Linear(s.width, s.kv_heads * HEAD, bias=False)
        self.v = nn.Linear(s.width, s.kv_heads * HEAD, bias=False)
        self.o = nn.Linear(s.heads * HEAD, s.width, bias=False)
        self.gate = nn.Linear(s.width, s.hidden, bias=False)
        self.up = nn.Linear(s.width, s.hidden, bias=False)
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x, cos, sin):
        s, batch = self.s, x.shape[0]
        h = self.norm(x)
        q = turn(self.q(h).view(batch, SEQUENCE, s.heads, HEAD), cos, sin).transpose(1, 2)
        k = turn(self.k(h).view(batch, SEQUENCE, s.kv_heads, HEAD), cos, sin).transpose(1, 2)
        v = self.v(h).view(batch, SEQUENCE, s.kv_heads, HEAD).transpose(1, 2)
        grouped = s.heads != s.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(out.transpose(1, 2).reshape(batch, SEQUENCE, -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, s.width)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.width)
        self.head = nn.Linear(s.width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(self, tokens, targets, cos, sin):
        x = self.embed(tokens).to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(
            self.head(self.norm(x)).float().view(-1, VOCABULARY), targets.reshape(-1)
        )


def main(name, tokens_path, warm):
    s = SHAPES[name]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Model(s)
    frequencies = 1e4 ** -(torch.arange(0, HEAD, 2, device="cuda").double() / HEAD)
    angles = (torch.arange(SEQUENCE, device="cuda")[:, None] * frequencies).float()
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    step_model = torch.compile(model)
    data = np.load(tokens_path)
    losses = []
    for step, rows in enumerate(data):
        if step == warm:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
        batch = torch.from_numpy(rows.astype(np.int64)).pin_memory().to("cuda", non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = step_model(batch[:, :-1], batch[:, 1:], cos, sin)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / (len(data) - warm)
    peak = torch.cuda.max_memory_allocated()
    report = {"step_s": step_s, "peak_bytes": peak, "losses": [float(x) for x in losses]}
    print("REPORT " + json.dumps(report))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
