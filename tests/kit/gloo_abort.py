"""
A process that gloo aborts after its interpreter has ended, for a report to PyTorch: `python gloo_abort.py HOW`.

With `end` the interpreter ends while a thread of gloo still has a collective with a Python callback, which wants the
GIL: Python ends that thread, and the C++ around it calls `std::terminate` ("terminate called without an active
exception", `<no Python frame>`, SIGABRT; torch 2.13, Python 3.11, every time). With `wait` the collective is waited
for; with `leave` the process ends at once, as in `processes.leave`. Both return 0. See pytorch/pytorch#179291,
#190489.

Here the other process is late on purpose. Trainings end with the same message now and then, though their collectives
were waited for; what the thread still held there is not known. Nor is the cause of a SIGSEGV seen once within a
collective of FSDP2: half a million gathers, reductions and scatters in one process, of tensors that ended with the
call, did not show it.
"""

import faulthandler
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist


def main(how: str) -> None:
    path = os.path.join(tempfile.mkdtemp(), "store")
    rank = 0 if os.fork() else 1
    faulthandler.enable()
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        dist.all_reduce(torch.ones(4))
        time.sleep(2)
        os._exit(0)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.get_future().then(lambda future: future.value())
    if how == "wait":
        work.wait()
    if how == "leave":
        os._exit(0)
    sys.slow = Slow()


class Slow:
    """Takes a second to be cleared, as the modules of a training do."""

    def __del__(self, sleep=time.sleep):
        sleep(1)


if __name__ == "__main__":
    main(sys.argv[1])
