"""The families of Hugging Face models that are read and written."""

from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .family import Family as Family
from .llama import LLAMA, LLAMA4, MISTRAL, MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE
from .local_global import GEMMA2, GEMMA3, GEMMA4, GPT_OSS, OLMO2, OLMO3
from .qwen3_next import QWEN3_NEXT

# An export takes the first family that can describe the transformer, so the simplest come first.
FAMILIES: tuple[Family, ...] = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, PHI3, OLMO2, OLMO3),
    *(GEMMA2, GEMMA3, GEMMA4, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, LLAMA4, QWEN3_NEXT),
)
