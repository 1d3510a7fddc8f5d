# Written by `make format` from the list in __init__.py.

from .experts.feed_forward import ExpertBiases as ExpertBiases
from .experts.layer import moe_ffn as moe_ffn
from .experts.layer import place_experts as place_experts
from .experts.placement import ExpertPlacement as ExpertPlacement
from .experts.placement import balance_experts as balance_experts
from .experts.routing import ExpertGroups as ExpertGroups
from .experts.routing import RouterStats as RouterStats
from .experts.routing import Routing as Routing
from .experts.routing import route as route
from .experts.routing import update_router_bias as update_router_bias
from .mesh.mesh import MeshConfig as MeshConfig
from .mesh.mesh import abstract_mesh as abstract_mesh
from .mesh.mesh import create_mesh as create_mesh
from .pipelining.forward import PipelineParams as PipelineParams
from .pipelining.forward import join_microbatches as join_microbatches
from .pipelining.forward import join_stages as join_stages
from .pipelining.forward import pipeline as pipeline
from .pipelining.forward import split_microbatches as split_microbatches
from .pipelining.forward import split_stages as split_stages
from .pipelining.gradient import pipeline_value_and_grad as pipeline_value_and_grad
from .pipelining.schedule import PipelineSchedule as PipelineSchedule
from .rebalancing import ShardingAdvice as ShardingAdvice
from .rebalancing import detect_hotspots as detect_hotspots
from .rebalancing import optimize_sharding as optimize_sharding
from .rebalancing import reshard as reshard
from .ring.attention import ring_attention as ring_attention
from .ring.linear_attention import context_gated_delta as context_gated_delta
from .ring.linear_attention import context_short_convolution as context_short_convolution
from .ring.order import from_zigzag as from_zigzag
from .ring.order import to_zigzag as to_zigzag
from .sharding.activations import activation_rules as activation_rules
from .sharding.activations import constrain as constrain
from .sharding.api import get_sharding_spec as get_sharding_spec
from .sharding.api import shard_model as shard_model
from .sharding.api import unpad as unpad
from .sharding.api import validate_sharding as validate_sharding
from .sharding.layout import Layout as Layout
from .sharding.layout import make_layout as make_layout

__all__ = [
    "ExpertBiases",
    "ExpertGroups",
    "ExpertPlacement",
    "Layout",
    "MeshConfig",
    "PipelineParams",
    "PipelineSchedule",
    "RouterStats",
    "Routing",
    "ShardingAdvice",
    "abstract_mesh",
    "activation_rules",
    "balance_experts",
    "constrain",
    "context_gated_delta",
    "context_short_convolution",
    "create_mesh",
    "detect_hotspots",
    "from_zigzag",
    "get_sharding_spec",
    "join_microbatches",
    "join_stages",
    "make_layout",
    "moe_ffn",
    "optimize_sharding",
    "pipeline",
    "pipeline_value_and_grad",
    "place_experts",
    "reshard",
    "ring_attention",
    "route",
    "shard_model",
    "split_microbatches",
    "split_stages",
    "to_zigzag",
    "unpad",
    "update_router_bias",
    "validate_sharding",
]
