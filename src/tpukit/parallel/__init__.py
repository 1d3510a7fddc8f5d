"""Meshes and sharding: where every array of a model lives on a slice."""

from .activations import activation_rules as activation_rules
from .activations import constrain as constrain
from .experts import moe_ffn as moe_ffn
from .experts import place_experts as place_experts
from .mesh import MeshConfig as MeshConfig
from .mesh import abstract_mesh as abstract_mesh
from .mesh import create_mesh as create_mesh
from .routing import RouterStats as RouterStats
from .routing import Routing as Routing
from .routing import route as route
from .routing import update_router_bias as update_router_bias
