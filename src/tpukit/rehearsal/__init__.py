"""Rehearse a job on this machine: plan, check, launch, preempt, resume, profile, quantize.

`rehearse` runs one stage after another and returns their results. A stage implements the protocol
`stage.Stage` and calls the public functions of other rooms.
"""
