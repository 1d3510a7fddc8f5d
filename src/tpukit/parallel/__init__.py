"""Meshes and sharding: where every array of a model lives on a slice."""

from .activations import activation_rules as activation_rules
from .activations import constrain as constrain
from .mesh import MeshConfig as MeshConfig
from .mesh import abstract_mesh as abstract_mesh
from .mesh import create_mesh as create_mesh
