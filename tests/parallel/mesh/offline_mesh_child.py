"""Run in a child that may load libtpu: make meshes of offline topologies, report coordinates."""

from jax.experimental import topologies

from tpukit.errors import MeshError
from tpukit.parallel import create_mesh
from tpukit.runtime.child import serve_request


def answer(request):
    meshes = []
    for case in request["cases"]:
        topology = topologies.get_topology_desc(
            topology_name=case["topology"], platform="tpu", **case["options"]
        )
        devices = topology.devices[: case.get("take", len(topology.devices))]
        try:
            mesh = create_mesh(
                mesh_shape=case["shape"],
                axis_names=["a", "b", "c"][: len(case["shape"])],
                devices=devices,
                dcn_mesh_shape=case.get("dcn"),
            )
        except MeshError as error:
            meshes.append({"error": str(error)})
            continue
        places = [
            [
                [*map(int, device.coords)],
                int(device.core_on_chip),
                int(getattr(device, "slice_index", 0)),
            ]
            for device in mesh.devices.flat
        ]
        meshes.append({"shape": list(mesh.devices.shape), "places": places})
    return {"meshes": meshes}


if __name__ == "__main__":
    serve_request(answer)
