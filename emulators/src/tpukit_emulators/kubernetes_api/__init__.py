"""A Kubernetes cluster with TPU nodes on this machine: its API, its controllers, real processes.

`store` holds the objects and `controllers` move them, with no word of HTTP; `http` shows them to
unmodified clients; `kubelet` runs containers as processes. `emulator` puts it together.
"""
