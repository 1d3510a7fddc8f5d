"""PyTorch modules are quantized as any other model: a module of one's own, and a tiny Llama."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")


def close_to(module, quantized, inputs, most):
    """Whether the quantized model gives what eager torch gives, but for what rounding loses."""
    with torch.no_grad():
        out = module(torch.from_numpy(inputs))
    expected = (out.logits if hasattr(out, "logits") else out).numpy()
    found = quantized(inputs)
    found = np.asarray(found["logits"] if isinstance(found, dict) else found)
    lost = ((found - expected) ** 2).mean() / (expected**2).mean()
    assert 0 < lost < most


def test_a_module_of_ones_own():
    pytest.importorskip("torchax")
    from tpukit.quantization import quantize_model

    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16)
    ).eval()
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(32, 64)).astype(np.float32) for _ in range(4)]
    result = quantize_model(module, batches, format="int8", sequential=1)
    assert [row.format for row in result.report.matrices] == ["int8", "int8"]
    close_to(module, result.model, batches[0], 1e-3)


@pytest.mark.slow
def test_a_tiny_llama_of_hugging_face():
    pytest.importorskip("torchax")
    transformers = pytest.importorskip("transformers")
    from tpukit.quantization import quantize_for_tpu

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    inner = transformers.LlamaForCausalLM(config).eval()

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = inner

        def forward(self, tokens):
            return self.model(tokens).logits

    module = Logits().eval()
    tokens = np.random.default_rng(0).integers(0, 64, (2, 16))
    quantized = quantize_for_tpu(module, 8, inputs=tokens)
    close_to(module, quantized, tokens, 1e-3)
