"""How pods are linked, and how they add up their gradients."""

from collections.abc import Sequence

from ..spelling import SpelledEnum


class PodTopology(SpelledEnum):
    """The pattern in which pods exchange with each other.

    Attributes:
        RING: Each pod sends to its neighbour: least data in one place, as many rounds as pods.
        TREE: Pairs, pairs of pairs: few rounds, and far regions meet once.
        MESH: All with all, as the runtime sees fit.
    """

    RING = "ring"
    TREE = "tree"
    MESH = "mesh"

    Ring = RING
    Tree = TREE
    Mesh = MESH


class AllReduceStrategy(SpelledEnum):
    """How gradients of all devices become one sum.

    Attributes:
        FLAT: One sum over all devices; whatever the network.
        RING: One ring through all devices, pod after pod.
        HIERARCHICAL: Reduce and scatter within a pod (ICI), sum between pods (DCN, by the
            topology), gather within a pod: each byte crosses between pods once.
        LOCAL_STEPS: Sum within a pod alone; pods meet after many steps (DiLoCo, arXiv 2311.08105).
    """

    FLAT = "flat"
    RING = "ring"
    HIERARCHICAL = "hierarchical"
    LOCAL_STEPS = "local_steps"

    FlatAllReduce = FLAT
    RingAllReduce = RING
    HierarchicalAllReduce = HIERARCHICAL
    LocalSteps = LOCAL_STEPS
    DiLoCo = LOCAL_STEPS


def neighbourly_order(zones: Sequence[str]) -> tuple[int, ...]:
    """Return pods in an order that keeps those of one zone, then of one region, side by side.

    A ring in this order crosses between regions as seldom as it can, and a tree pairs within a
    region before it pairs regions.
    """
    regions = [zone.rpartition("-")[0] for zone in zones]
    return tuple(sorted(range(len(zones)), key=lambda pod: (regions[pod], zones[pod], pod)))
