"""The torch module of the comparison, and the weights that all programs share."""

import numpy as np
import torch
import torch.nn.functional as F
from shapes import HEAD, SEQUENCE, VOCABULARY
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


class MLP(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.gate = nn.Linear(s.width, s.hidden, bias=False)
        self.up = nn.Linear(s.width, s.hidden, bias=False)
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.norm, self.mlp_norm = Norm(s.width), Norm(s.width)
        self.q = nn.Linear(s.width, s.heads * HEAD, bias=False)
        self.k = nn.Linear(s.width, s.kv_heads * HEAD, bias=False)
        self.v = nn.Linear(s.width, s.kv_heads * HEAD, bias=False)
        self.o = nn.Linear(s.heads * HEAD, s.width, bias=False)
        self.mlp = MLP(s)

    def forward(self, x, cos, sin):
        s, batch = self.s, x.shape[0]
        h = self.norm(x)
        q = turn(self.q(h).view(batch, SEQUENCE, s.heads, HEAD), cos, sin).transpose(1, 2)
        k = turn(self.k(h).view(batch, SEQUENCE, s.kv_heads, HEAD), cos, sin).transpose(1, 2)
        v = self.v(h).view(batch, SEQUENCE, s.kv_heads, HEAD).transpose(1, 2)
        grouped = s.heads != s.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(out.transpose(1, 2).reshape(batch, SEQUENCE, -1))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, s.width)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.width)
        self.head = nn.Linear(s.width, VOCABULARY, bias=False)
        frequencies = 1e4 ** -(torch.arange(0, HEAD, 2).double() / HEAD)
        angles = (torch.arange(SEQUENCE)[:, None] * frequencies).float()
        self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens).to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(
            self.head(self.norm(x)).float().view(-1, VOCABULARY), targets.reshape(-1)
        )


def start_from(model, given):
    """Copy the weights that all programs share; matrices here are (outputs, inputs)."""

    def put(parameter, array):
        parameter.copy_(torch.from_numpy(np.array(array)))

    with torch.no_grad():
        put(model.embed.weight, given["embed"])
        put(model.norm.scale, given["norm"])
        put(model.head.weight.T, given["head"])
        for place, layer in enumerate(model.layers):
            one = {name: stack[place] for name, stack in given["layers"].items()}
            put(layer.norm.scale, one["norm"])
            put(layer.mlp_norm.scale, one["mlp_norm"])
            for owner, names in (
                (layer, ("q", "k", "v", "o")),
                (layer.mlp, ("gate", "up", "down")),
            ):
                for name in names:
                    put(getattr(owner, name).weight.T, one[name])
