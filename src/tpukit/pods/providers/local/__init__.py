"""Pods on this machine: every host is a process of its own, with virtual devices."""
