"""The families of Hugging Face models that are read and written."""

from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .family import Family as Family
from .gemma import GEMMA2, GEMMA3
from .gemma4 import GEMMA4
from .gpt_oss import GPT_OSS
from .llama import LLAMA, MISTRAL, MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE
from .llama4 import LLAMA4
from .olmo import OLMO2, OLMO3
from .qwen3_next import QWEN3_NEXT

# In the order in which one is looked for that can hold a transformer: the plainest first.
FAMILIES: tuple[Family, ...] = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, PHI3, OLMO2, OLMO3),
    *(GEMMA2, GEMMA3, GEMMA4, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, LLAMA4, QWEN3_NEXT),
)
