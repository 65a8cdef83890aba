"""What runs steps, whatever they do; the steps themselves are in `packhouse.steps`.

`step.py` says what a step is, makes the keys of jobs, and does one job; `workspace.py` is where.
`local_pool.py` runs jobs on this machine, in the groups that `grouping.py` makes. `last_run.py`
remembers the last plan. Finished steps lie in `packhouse.cache`. Nothing here imports a step.
"""
