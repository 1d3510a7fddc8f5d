"""Meshes and sharding: where every array of a model lives on a slice."""

from .activations import activation_rules as activation_rules
from .activations import constrain as constrain
from .expert_placement import ExpertPlacement as ExpertPlacement
from .expert_placement import balance_experts as balance_experts
from .experts import moe_ffn as moe_ffn
from .experts import place_experts as place_experts
from .layout import Layout as Layout
from .layout import make_layout as make_layout
from .mesh import MeshConfig as MeshConfig
from .mesh import abstract_mesh as abstract_mesh
from .mesh import create_mesh as create_mesh
from .pipeline import PipelineParams as PipelineParams
from .pipeline import join_microbatches as join_microbatches
from .pipeline import join_stages as join_stages
from .pipeline import pipeline as pipeline
from .pipeline import split_microbatches as split_microbatches
from .pipeline import split_stages as split_stages
from .pipeline_gradient import pipeline_value_and_grad as pipeline_value_and_grad
from .pipeline_schedule import PipelineSchedule as PipelineSchedule
from .rebalance import ShardingAdvice as ShardingAdvice
from .rebalance import detect_hotspots as detect_hotspots
from .rebalance import optimize_sharding as optimize_sharding
from .reshard import reshard as reshard
from .ring_attention import ring_attention as ring_attention
from .ring_layout import from_zigzag as from_zigzag
from .ring_layout import to_zigzag as to_zigzag
from .routing import RouterStats as RouterStats
from .routing import Routing as Routing
from .routing import route as route
from .routing import update_router_bias as update_router_bias
from .sharding import get_sharding_spec as get_sharding_spec
from .sharding import shard_model as shard_model
from .sharding import unpad as unpad
from .validate import validate_sharding as validate_sharding

__all__ = [
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
