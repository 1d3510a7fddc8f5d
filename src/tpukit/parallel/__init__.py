"""Meshes and sharding: where every array of a model lives on a slice."""

from ..lazy import lazy_names

HOMES = {
    ".experts.feed_forward": ("ExpertBiases",),
    ".experts.layer": (
        "moe_ffn",
        "place_experts",
    ),
    ".experts.placement": (
        "ExpertPlacement",
        "balance_experts",
    ),
    ".experts.routing": (
        "ExpertGroups",
        "RouterStats",
        "Routing",
        "route",
        "update_router_bias",
    ),
    ".mesh.mesh": (
        "MeshConfig",
        "abstract_mesh",
        "create_mesh",
    ),
    ".pipelining.forward": (
        "PipelineParams",
        "join_microbatches",
        "join_stages",
        "pipeline",
        "split_microbatches",
        "split_stages",
    ),
    ".pipelining.gradient": ("pipeline_value_and_grad",),
    ".pipelining.schedule": ("PipelineSchedule",),
    ".rebalancing": (
        "ShardingAdvice",
        "detect_hotspots",
        "optimize_sharding",
        "reshard",
    ),
    ".ring.attention": ("ring_attention",),
    ".ring.linear_attention": (
        "context_gated_delta",
        "context_short_convolution",
    ),
    ".ring.order": (
        "from_zigzag",
        "to_zigzag",
    ),
    ".sharding.activations": (
        "activation_rules",
        "constrain",
    ),
    ".sharding.api": (
        "get_sharding_spec",
        "shard_model",
        "unpad",
        "validate_sharding",
    ),
    ".sharding.layout": (
        "Layout",
        "make_layout",
    ),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, HOMES)
