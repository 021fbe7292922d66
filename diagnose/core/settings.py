"""How the process was set up, as far as that decides its speed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings as the training thread had them after a few steps. `None` was not measured.

    Attributes:
        omp_num_threads: What `OMP_NUM_THREADS` was set to; 0 when it was not.
        bound_by: The variable of the environment that binds threads to CPUs, such as `KMP_AFFINITY`.
        sleeps_by: The setting of the environment that lets idle threads of torch sleep at once, such as
            `OMP_WAIT_POLICY=passive`; empty when there is none.
        local_processes: Training processes on this machine, this one included.
        start_method: How processes are started unless the script says so: `fork`, `spawn`, `forkserver`.
        trace: Module of the function that Python calls for every line or call, such as `pydevd` or
            `cProfile`; empty when there is none.
        trace_function: That function, as lines of it are told: `CallGraph.__call__`; empty where it is not
            written in Python.
        recorded: What torch's profiler, if the script starts it, records besides operations, by the names
            of its arguments: `record_shapes`, `with_stack`.
        sets_threads: Whether the number of torch's threads was set after torch had been imported; not told
            where it was set to what it had been.
        num_leaf_modules: Modules without children in the models that are trained.
        num_module_hooks: Hooks registered on those models' modules.
    """

    omp_num_threads: int | None = None
    bound_by: str = ""
    sleeps_by: str = ""
    local_processes: int = 1
    start_method: str = "fork"
    trace: str = ""
    trace_function: str = ""
    recorded: tuple[str, ...] = ()
    sets_threads: bool | None = None
    num_leaf_modules: int | None = None
    num_module_hooks: int | None = None
