"""The whole life of a job on this machine: planned, checked, launched, preempted, resumed, used.

`rehearse` plays one stage after another and returns what each found. A stage is a small citizen of
one protocol (`stage.Stage`) that calls the public functions of the rooms above; nothing of them is
done again here.
"""
