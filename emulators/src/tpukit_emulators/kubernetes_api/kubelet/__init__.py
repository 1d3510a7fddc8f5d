"""Runs the containers of Pods as real processes of this machine, with their logs."""
