"""Meshes and sharding: where every array of a model lives on a slice."""
