"""Two ranks, of which one waits for a key by asking the store again and again, a quarter of a second each time.

"written": the other writes it in time; "never": nobody does; "gives-up": it asks five times, then goes on without it.
"""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

KEY = "weights/ready"
way = sys.argv[1]
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 1 and way == "written":
    time.sleep(2)
    store.set(KEY, "yes")
asked = 0
while dist.get_rank() == 0 and not (way == "gives-up" and asked == 5):
    asked += 1
    try:
        store.wait([KEY], timedelta(seconds=0.25))
        break
    except dist.DistStoreError:
        pass
if way == "gives-up":
    time.sleep(3)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
